"""`quire bench host`: what a decode step costs on the host, with a device that computes nothing.

Scheduler, runner, sampling part and results are the engine's own; executable, cache and sampler are empty. A device
that takes as long as it is told shows how much of the host's time overlapped steps hide.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cli import Command, Options
from quire.config import SchedulerConfig, option
from quire.devices.inputs import check_input
from quire.devices.protocol import KVSpec, Limits, ModelInput
from quire.devices.sampling import Samples, SlotSampling
from quire.engine import garbage
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.runtime.inputs import InputBuilder
from quire.runtime.runner import Runner
from quire.runtime.slots.sampling import SamplingPart
from quire.runtime.slots.scoring import ScoringPart
from quire.sched.scheduler import Scheduler
from quire.types import Request

BLOCK, PROMPT, VOCABULARY = 16, 32, 1000
LINE = "{:>9} {:>12} {:>16} {:>22} {:>12}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions(Options):
    """Options of `quire bench host`."""

    batch: str = option("1,64,256,1024", "Numbers of sequences, separated by commas.")
    steps: int = option(200, "Decode steps that are timed.", low=2)
    device_ms: float = option(5.0, "Milliseconds that the device takes in overlapped steps.", low=0.0)
    json: bool = option(False, "Print JSON instead of a table.")


@dataclass(frozen=True, slots=True)
class Figures:
    """A decode step's microseconds of CPU on the host, and steps per second with a device of `device_ms` a step."""

    batch: int
    step_us: float
    overlapped_per_second: float


class Nothing:
    """A device that computes nothing, as executable, KV cache and sampler. A step takes it `seconds`."""

    def __init__(self, limits: Limits, num_blocks: int, seconds: float) -> None:
        self.spec, self.num_blocks, self.block_size = KVSpec(1, 1, 16, "float32"), num_blocks, BLOCK
        self._limits, self._seconds = limits, seconds
        self._free = 0.0  # when the device has computed what was launched

    def run(self, inputs: ModelInput) -> Any:
        check_input(inputs, self, self._limits, VOCABULARY)  # type: ignore[arg-type]
        self._free = max(self._free, time.perf_counter()) + self._seconds
        return range(len(inputs.logit_rows_L))

    def sample(self, logits: Any, slots: list[int], *more: Any) -> Late:
        return Late(Samples([7] * len(slots)), self._free)

    def set(self, slot: int, state: SlotSampling) -> None: ...
    def clear(self, slot: int) -> None: ...
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Late:
    """Samples that are there at a point in time."""

    samples: Samples
    ready: float

    def result(self) -> Samples:
        wait = self.ready - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        return self.samples


def engine(batch: int, steps: int, seconds: float, depth: int) -> EngineCore:
    """Make an engine in which `batch` sequences have passed their prompts, with tokens left for `steps`."""
    length = PROMPT + steps + 8
    blocks = -(-length // BLOCK)
    limits = Limits(max(8192, batch), batch, batch)
    device: Any = Nothing(limits, batch * blocks, seconds)
    inputs = InputBuilder(batch, blocks, mirrored=True)
    parts: list[Any] = [SamplingPart(device), ScoringPart(device)]
    runner = Runner(device, [device], inputs, parts, batch, launches=depth > 1)
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=limits.max_tokens)
    core = EngineCore(Scheduler(config, device.num_blocks, BLOCK, length, False), runner, depth)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for number in range(batch):
        core.add(
            Request(
                id=str(number),
                tokens=[1 + number % 900] * PROMPT,
                sampling=params,
                seed=0,
                max_tokens=steps + 8,
            )
        )
    while sum(seq.num_computed >= PROMPT for seq in core.scheduler._planner.running) < batch:
        core.step()
    core.step()
    return core


def measure(batch: int, steps: int, device_ms: float) -> Figures:
    core, times = engine(batch, steps, 0.0, 1), list[float]()
    for _ in range(steps):
        began = time.thread_time()
        core.step()
        times.append(time.thread_time() - began)
    core = engine(batch, steps, device_ms / 1e3, 2)
    began = time.perf_counter()
    for _ in range(steps):
        core.step()
    return Figures(batch, statistics.median(times) * 1e6, steps / (time.perf_counter() - began))


def run(options: HostOptions) -> None:
    try:
        batches = [int(number) for number in options.batch.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ConfigError(f"--batch must be numbers of sequences, as in 1,64,256, got {options.batch!r}")
    garbage.collect_rarely()  # as the engine's process does
    found = [measure(batch, options.steps, options.device_ms) for batch in batches]
    if options.json:
        print(json.dumps([asdict(figures) for figures in found], indent=1))
        return
    most = 1e3 / options.device_ms if options.device_ms else 0.0
    print(LINE.format("sequences", "step (us)", "a sequence (us)", "overlapped (steps/s)", "of the most"))
    for figures in found:
        share = f"{figures.overlapped_per_second / most:.1%}" if most else "-"
        each = figures.step_us / figures.batch
        numbers = f"{figures.step_us:,.0f}", f"{each:.2f}", f"{figures.overlapped_per_second:,.1f}", share
        print(LINE.format(figures.batch, *numbers))


COMMAND = Command(run, HostOptions, uses=frozenset(), reads_user_file=False)
