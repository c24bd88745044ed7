"""The GPU architectures that kernels are compiled for, and what each of them has."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.errors import ConfigError

Family = Literal["ampere", "hopper", "interpreter"]


class Target(msgspec.Struct, frozen=True):
    """One architecture: its shared memory per program in bytes, and the multiprocessors of its usual card.

    `family` names the tiles that suit it (tiles.py). `warps` are those of a multiprocessor. `e4m3` tells whether it
    converts that type.
    """

    name: str
    family: Family
    shared_bytes: int
    processors: int
    warps: int = 64
    e4m3: bool = True

    @property
    def capability(self) -> int:
        return int(self.name.removeprefix("sm_"))


KIB, WARP = 1024, 32
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "ampere", 163 * KIB, 108, e4m3=False),
        Target("sm_86", "ampere", 99 * KIB, 84, 48, e4m3=False),
        Target("sm_89", "ampere", 99 * KIB, 128, 48),
        Target("sm_90", "hopper", 227 * KIB, 132),
        Target("sm_100", "hopper", 227 * KIB, 148),
        Target("sm_120", "ampere", 99 * KIB, 170, 48),
    )
}
# Programs run one after another on the CPU, and each is slow: the fewer, the better.
INTERPRETER = Target("interpreter", "interpreter", 1 << 40, 1)


def target_named(name: str) -> Target:
    """Return the target of that name. ConfigError if there is none."""
    if name not in TARGETS:
        raise ConfigError(f"--target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def target_of(major: int, minor: int) -> Target:
    """Return the target of a device's compute capability. ConfigError if kernels do not support it."""
    found = TARGETS.get(f"sm_{major}{minor}")
    if found is None:
        raise ConfigError(
            f"the device has compute capability {major}.{minor}; --device cuda needs one of "
            + ", ".join(name.removeprefix("sm_") for name in TARGETS)
        )
    return found
