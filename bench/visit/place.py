"""Places where stages run: a GPU, or the interpreter of its kernels on CPU tensors with the tiles of a GPU."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.devices.cuda.jit import InterpretedLauncher, JitLauncher
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.target import TARGETS, target_of

IN_TURN, REPEATS = 4, 7  # launches of a graph, and its replays


@dataclass(frozen=True, slots=True)
class Place:
    """A device, what launches its kernels, and how a stage reports. `known` are ceilings of this device.

    `share` tells which of how many processes of the stage this is.
    """

    device: str
    run: Launcher
    report: Callable[[dict[str, Any]], None]
    times: bool
    until: float
    known: dict[str, float]
    share: tuple[int, int]

    @property
    def small(self) -> bool:
        """Tell whether sizes are those that the interpreter computes in seconds."""
        return self.device != "cuda"

    @property
    def tensors(self) -> str:
        return "cpu" if self.small else "cuda"

    def row(self, name: str, ok: bool | None = None, **figures: Any) -> None:
        """Report a line. `ok` is the verdict of a check, None of a measurement."""
        self.report({"name": name, "ok": ok, **figures})

    def attempt(self, name: str, work: Callable[..., Any], *args: Any) -> None:
        """Call work(*args). What it raises is a row, and a traceback on the way; other work goes on."""
        try:
            work(*args)
        except Exception as error:
            traceback.print_exc()
            self.row(name, False, error=f"{type(error).__name__}: {error}"[:400])

    def draw(self, *shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
        """Random values: normal ones, or integers of all sizes for integer types."""
        made = torch.Generator(self.tensors).manual_seed(seed + 7 * sum(shape))
        if not dtype.is_floating_point:
            low, high = {torch.uint8: (0, 16), torch.int8: (-127, 128)}.get(dtype, (0, 1 << 30))
            return torch.randint(low, high, shape, generator=made, device=self.tensors, dtype=dtype)
        return torch.randn(shape, generator=made, device=self.tensors).to(dtype)

    def scales(self, *shape: int, factor: float = 1.0) -> Any:
        made = torch.Generator(self.tensors).manual_seed(sum(shape))
        return (torch.rand(shape, generator=made, device=self.tensors) + 0.5) * factor

    def empty(self, *shape: int, dtype: Any = torch.bfloat16) -> Any:
        """Memory that no kernel has written: not a number where the type has that."""
        return torch.full(
            shape, torch.nan if dtype.is_floating_point else 77, dtype=dtype, device=self.tensors
        )

    def numbers(self, values: Any, dtype: Any = torch.int32) -> Any:
        return torch.as_tensor(values, dtype=dtype).to(self.tensors)

    def rate(
        self,
        name: str,
        work: Callable[[int], Any],
        nbytes: float,
        operations: float = 0.0,
        unit: str = "bf16",
    ) -> None:
        """Measure work(i), whose numbers take other operands in turn, beside the ceiling that binds it.

        Its launches are replayed from a graph, so the host's time for them is not counted.
        """
        if not self.times or self.small:
            work(0)
            self.row(name, ran=True)
            return
        for i in range(IN_TURN):
            work(i)
        torch.cuda.synchronize()
        graph, taken = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for i in range(IN_TURN):
                work(i)
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / IN_TURN)
        seconds = statistics.median(taken)
        rates = {"gbs": nbytes / seconds / 1e9, "tflops": operations / seconds / 1e12}
        shares = [rates["gbs"] / self.known.get("copy gbs", rates["gbs"])]
        if operations:
            shares.append(rates["tflops"] / self.known.get(f"{unit} product tflops", rates["tflops"]))
        figures = {key: round(value, 2) for key, value in {"us": seconds * 1e6, **rates}.items() if value}
        self.row(name, **figures, share=round(max(shares), 3))


def open_place(
    device: str, report: Any, times: bool, limit: float, known: dict[str, float], share: tuple[int, int]
) -> Place:
    """Open the GPU, or the interpreter with tiles of sm_90."""
    run: Launcher = InterpretedLauncher(TARGETS["sm_90"])
    if device == "cuda":
        run = JitLauncher(target_of(*torch.cuda.get_device_capability(0)))
    return Place(device, run, report, times, time.monotonic() + limit, known, share)


def same(found: Any, wanted: Any) -> bool:
    """Tell whether tensors are equal to the last bit, and hold no unwritten element."""
    return torch.equal(found, wanted) and not bool(torch.isnan(found.float()).any())


def distance(found: Any, wanted: Any) -> float:
    """The norm of the difference from float64 values, beside theirs."""
    return float((found.double() - wanted).norm() / wanted.norm())
