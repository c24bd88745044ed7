"""Checks kernels on the device where they run: against plain torch, and that no bit of a row depends on other rows."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from quire.devices import ops
from quire.devices.cuda.arena import matrices
from quire.devices.cuda.cubins import sources
from quire.devices.cuda.encoders import exchanges, states
from quire.devices.cuda.fuse import Room, Round, RoundedGatedLinear, RoundedLinear
from quire.devices.cuda.pack import CudaMatrix
from quire.devices.cuda.plain import plain_value, put_codes, read
from quire.devices.cuda.step import CudaStep
from quire.devices.graph import Graph
from quire.devices.operands import Attention, Norm
from quire.devices.ops import Op, Value, operands
from quire.devices.protocol import Limits, ModelInput, StateInput
from quire.devices.sparse_ops import Choose, StoreKeys
from quire.errors import ConfigError, QuireError
from quire.files import read_bytes, replaced

log = logging.getLogger("quire.devices")

SKIPPED: tuple[type[Any], ...] = (*exchanges.ENCODERS, ops.SelectRows, ops.Tap, Room, Round)
RECURRENT: tuple[type[Any], ...] = (*states.ENCODERS,)
STORES = ops.StoreKV, ops.StoreLatent, StoreKeys
FIRST, SEEN = 6, 40
"""FIRST are the tokens of the sequence whose rows are compared, and SEEN those in its cache, if it has no state."""
OTHERS: tuple[tuple[int, ...], ...] = ((3,), (), (34,), (1, 70))
"""OTHERS are the tokens of the sequences beside it, in each step."""
BLOCKS = 5  # of a sequence: 70 tokens in blocks of 16
REPORT = "this line and the output of `quire doctor --json`"
MOST_BYTES, MOST_DEVICES = 1 << 20, 32
Launch = Callable[[CudaStep], None]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whether a kernel computes what plain torch does, and whether rows have their bits whatever is beside them.

    A library's has the `sizes` that it serves, in rows, and is exact if it has our bits (admit.py).
    """

    accurate: bool
    exact: bool
    sizes: tuple[int, ...] | None = None


Verdicts = dict[str, Verdict]


def described(op: Op[Value], index: int, widths: Sequence[int]) -> str:
    """Describe all that chooses the kernel of an operation; empty if there is none to check."""
    if isinstance(op, SKIPPED):
        return ""
    parts = [
        _part(getattr(op, name), widths) for name in op.__struct_fields__ if name not in ("path", "layer")
    ]
    if isinstance(op, (ops.RunExperts, ops.HeadLinear)):
        parts += sorted({_part(weight, widths) for weight in matrices(op)})
    return f"{type(op).__name__}({', '.join(part for part in parts if part)}) -> {widths[index]}"


def _part(value: Any, widths: Sequence[int]) -> str:
    if isinstance(value, Value):
        return str(widths[value])
    if isinstance(value, CudaMatrix):
        kind = str(value.dtype)[6:] if value.packed is None else value.packed.form.name
        about = " rounded" * value.rounds + " arranged" * (value.inputs is not None)
        return f"{kind} {value.shape[0]}x{value.shape[1]}{about}"
    if isinstance(value, Norm):
        return value.kind
    if isinstance(value, Attention):
        return f"window {value.window} chunk {value.chunk} cap {value.cap}"
    return str(value) if isinstance(value, (int, float, str)) else ""


def check(
    graph: Graph, calls: Sequence[Launch], filled: Callable[[ModelInput], CudaStep], names: list[str], limits: Limits
) -> Verdicts:  # fmt: skip
    """Run one operation of each name but the empty one over random rows, in steps that are `filled`."""
    most = limits.max_tokens, limits.max_seqs, limits.max_logit_rows
    found: Verdicts = {}
    for index, op in enumerate(graph.ops):
        name = names[index]
        if not name or name in found:
            continue
        rows, wanted = list[Any](), None
        for others in OTHERS:
            counts = FIRST, *others
            if sum(counts) > most[0] or len(counts) > most[1]:
                continue
            step = filled(_inputs(counts, graph.token_limit, isinstance(op, RECURRENT)))
            if step.states is not None and len(counts) > step.cache.num_states:
                continue
            step.narrow(graph.hidden, 0, min(sum(counts), most[2]))
            _fill(step, graph, op)
            if (out := step[Value(index)]).is_floating_point():
                out.fill_(torch.nan)
            calls[index](step)
            rows.append(_with_kept(read(step, graph, Value(index)), op, step).clone()[: min(FIRST, most[2])])
            if wanted is None:
                wanted = _with_kept(plain_value(op, step, graph), op, step)[: len(rows[0])]
        if wanted is None:
            continue
        exact = all(torch.equal(rows[0], other) for other in rows[1:])
        found[name] = Verdict(_near(rows[0], wanted, op), exact)
    return found


def _inputs(counts: Sequence[int], vocab: int, recurrent: bool) -> ModelInput:
    """Make a step of sequences that begin, but for the first one's SEEN tokens."""
    total, number, seen = sum(counts), len(counts), [0 if recurrent else SEEN, *([0] * (len(counts) - 1))]
    parts = [np.arange(first, first + count) for first, count in zip(seen, counts, strict=True)]
    positions, lengths = np.concatenate(parts).astype(np.int32), np.array(counts, np.int32)
    bounds = np.cumsum([0, *counts]).astype(np.int32)
    order, blocks = np.arange(number, dtype=np.int32), np.arange(number * BLOCKS, dtype=np.int32)
    tokens = (positions * 7 + np.repeat(order, counts)) % vocab
    given = StateInput(order, 0 * order, lengths, np.zeros((0, 3), np.int32)) if recurrent else None
    return ModelInput(
        tokens.astype(np.int32), positions, bounds, lengths + np.array(seen, np.int32), order,
        blocks.reshape(number, BLOCKS), np.arange(total, dtype=np.int32), states=given,
    )  # fmt: skip


def _with_kept(value: Any, op: Op[Value], step: CudaStep) -> Any:
    """Return a result, with the keys and values beside it that its operation stored."""
    cache = step.plain.cache
    if not isinstance(op, STORES) or cache.spec.layer(op.layer).every > 1:
        return value.float()
    sides = cache.keys[op.layer], cache.values[op.layer]
    kept = (side[step.places[: len(value)]].float().flatten(1) for side in sides)
    return torch.cat([value.float(), *kept], 1)


def _fill(step: CudaStep, graph: Graph, op: Op[Value]) -> None:
    """Give an operation random operands, of which each row is the same in all steps."""
    made = torch.Generator().manual_seed(1)
    for value in operands(op):
        place = step[value]
        width = place.shape[1]
        rows = torch.randn(128, width, generator=made)[: len(place)].to(place.device)
        producer = graph.ops[value]
        if isinstance(producer, ops.Route):
            ids, weights = step.routes(value)
            chosen = torch.arange(len(ids))[:, None] * 3 + torch.arange(ids.shape[1])
            ids.copy_((chosen % producer.routing.num_experts).to(ids.device))
            weights.copy_(rows[:, : ids.shape[1]].abs())
        elif isinstance(op, ops.Attend) and value == op.chosen:
            number = (torch.arange(width) % (width // op.groups)).to(place.device)
            pool = op.pool if op.entries is None else step.cache.spec.layer(op.entries).every
            whole = (number + 1) * pool <= step.positions[:, None] + 1
            place.copy_(torch.where(whole, number, -1))
        elif not isinstance(producer, (Round, Room)) or not getattr(producer, "codes", True):
            place.copy_(rows.sigmoid() if isinstance(op, RECURRENT) else rows)  # steps of states are positive
    if isinstance(op, (RoundedLinear, RoundedGatedLinear)):
        put_codes(step[op.x].float(), *step.codes(op.codes))  # no kernel that the graph may lack
    if not isinstance(op, (ops.Attend, Choose)):
        return
    further = op.entries if isinstance(op, ops.Attend) else None
    for index in {op.layer, op.layer if further is None else further}:
        layer = step.cache.layers[index]
        for side in (layer.keys, layer.values):
            if side is not None:
                own = side[: BLOCKS * 3]
                values = torch.randn(own.shape, generator=made) * (30 if own.dtype == torch.int8 else 1)
                own.copy_(values.to(own.device).to(own.dtype))
        for scales in (layer.key_scales, layer.value_scales):
            if scales is not None and layer.keys.dtype == torch.int8:
                scales[: BLOCKS * 3] = 0.03


def _near(found: Any, wanted: Any, op: Op[Value]) -> bool:
    if isinstance(op, ops.Route):  # of equal scores either may be chosen
        return bool(torch.isfinite(found).all())
    if isinstance(op, Choose):
        return float((found == wanted).float().mean()) > 0.9
    most = float(wanted.abs().max()) + 1e-6
    return bool(((found - wanted).abs() <= 0.05 * most).all())  # NaN is not


def fingerprint(device: Any, target: str) -> str:
    """Return everything that verdicts depend on."""
    name = "interpreter" if device.type != "cuda" else torch.cuda.get_device_name(device)
    beside = b"".join(Path(__file__).with_name(f"{one}.py").read_bytes() for one in ("tiles", "libraries"))
    code = f"{sources()[:16]}-{zlib.crc32(beside):08x}"
    return f"{name}, {target}, torch {torch.__version__}, CUDA {torch.version.cuda}, {code}"


class Checks:
    """Verdicts of earlier starts by fingerprint, in a file of the user's. One that cannot be read is made anew.

    Without a path this start's are kept alone.
    """

    def __init__(self, path: Path | None, exact: bool) -> None:
        self.path, self.exact, self._all = path, exact, dict[str, Verdicts]()
        if path is None:
            return
        try:
            data = read_bytes(path, MOST_BYTES)
            self._all = msgspec.json.decode(data, type=dict[str, Verdicts])
        except (OSError, msgspec.DecodeError, QuireError) as error:
            log.debug("%s has no verdicts: %s", path, error)

    def of(self, device: str) -> Verdicts:
        return self._all.get(device, {})

    def judge(self, verdicts: Verdicts, instead: str = "") -> set[str]:
        """Return the operations that plain torch computes instead, with a warning.

        ConfigError: bits are not kept, or nothing computes what is wrong, and the user can do something `instead`.
        """
        wrong = sorted(name for name, verdict in verdicts.items() if not verdict.accurate)
        loose = sorted(name for name, verdict in verdicts.items() if verdict.accurate and not verdict.exact)
        if loose and self.exact:
            raise ConfigError(
                f"on this GPU, rows of {'; '.join(loose)} depend on those beside them: --no-batch-invariant gives up "
                f"exactness; please report {REPORT}"
            )
        if loose:
            log.warning("answers may depend on requests beside them, by the kernels of %s", "; ".join(loose))
        if wrong and instead:
            raise ConfigError(f"on this GPU, {'; '.join(wrong)} are wrong: {instead}; please report {REPORT}")
        if wrong:
            log.warning(
                "on this GPU, kernels are wrong, so plain torch computes, row by row and slowly: %s; please report %s",
                "; ".join(wrong), REPORT,
            )  # fmt: skip
        return set(wrong)

    def hold(self, device: str, name: str, check: Callable[[], Verdict], instead: str = "") -> bool:
        """Tell whether a part computes what it should. What was not checked before is checked now.

        ConfigError: it does not, and what the user can do is `instead`; or bits are not kept.
        """
        verdict = self.of(device).get(name)
        if verdict is None:
            verdict = check()
            self.add(device, {name: verdict})
        return not self.judge({name: verdict}, instead)

    def add(self, device: str, verdicts: Verdicts) -> None:
        """Keep verdicts, and forget the devices that were checked first."""
        self._all[device] = {**self._all.pop(device, {}), **verdicts}
        self._all = dict([*self._all.items()][-MOST_DEVICES:])
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self.path) as new:
                new.write_bytes(msgspec.json.encode(self._all))
        except OSError as error:
            log.warning("verdicts of kernels cannot be kept, so each start checks them: %s", error)


class Asked(Checks):
    """Verdicts of this run alone, which change nothing."""

    def __init__(self) -> None:
        super().__init__(None, exact=False)

    def judge(self, verdicts: Verdicts, instead: str = "") -> set[str]:
        return set()
