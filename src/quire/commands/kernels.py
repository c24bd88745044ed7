"""`quire kernels`: compiles the kernels of GPUs for a target, and lists what each of them takes. Needs no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass

from quire.cli import Command
from quire.config import check_options, option
from quire.devices import registry

LINE = "{:40} {:16} {:>9} {:>7} {:>10} {:>9}  {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options of `quire kernels`."""

    target: str = option("sm_90", "The architecture to compile for, for example sm_80.")
    json: bool = option(False, "Print JSON instead of a table.")

    def __post_init__(self) -> None:
        check_options(self)


def run(options: KernelOptions) -> None:
    rows = registry.selection.compiled_kernels(options.target)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(LINE.format("case", "kernel", "registers", "spilled", "shared KiB", "cubin KiB", "instruction"))
    for row in rows:
        kib = [f"{row[name] / 1024:.0f}" for name in ("shared_bytes", "cubin_bytes")]
        print(
            LINE.format(
                row["case"], row["kernel"], row["registers"], row["spilled"], *kib, row["instruction"]
            )
        )


COMMAND = Command(run, KernelOptions, uses=frozenset(), reads_user_file=False)
