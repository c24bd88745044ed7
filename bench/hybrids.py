"""Speed of recurrent models beside the machine's limits and an attention model of as many parameters, random weights.

    python bench/hybrids.py [--only Qwen3.5 bf16] [--seconds 20] [--prompts 1024,16384] [--threads N] [--parts 1]

Decoding is limited by reading: weights, KV and states (read once) beside the read bandwidth. Prompts and batches are
limited by arithmetic: operations beside the peak of the weights' type. Limits are measured once per pair of models, and
`dense` is the hybrid's rate beside that of the attention model, measured just before it.

No task takes much more than `--seconds`: of a longer prompt its first tokens are computed, and of the batch's outputs
the first 24 each, which the row says. `--only` takes rows whose line has all its words.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import SHAPES, dense_beside, shape, write

from quire import LLM, SamplingParams
from quire.config import DeviceConfig
from quire.devices.protocol import MachineLimits
from quire.engine.plan import make_backend

QUANTIZATIONS = {"bf16": None, "int8": "int8"}
SAMPLED = 24
BATCH, LENGTH = 32, 128


@dataclass(frozen=True)
class Row:
    """A task's rate in tokens per second, what limits it, and what it needs a token: GB to read, or GFLOP."""

    task: str
    rate: float
    limit: str
    need: float
    note: str = ""


class Model:
    """A loaded model, and what it is asked."""

    def __init__(self, path: Path, quantization: str | None, threads: int | None) -> None:
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": 20480,
            "max_num_seqs": BATCH,
            "max_num_batched_tokens": 1024,
            "kv_cache_memory_bytes": 4 << 30,
        }
        self.llm = LLM(str(path), quantization=quantization, threads=threads, **options)
        self.report, self.rng = self.llm.report, random.Random(0)

    def seconds(self, count: int, prompt: int, outputs: int) -> tuple[float, float]:
        """Measure the seconds to the last first token, and those of a step after it."""
        ids = [[self.rng.randrange(self.llm.vocab_size) for _ in range(prompt)] for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        asked: Any = [{"prompt_token_ids": one} for one in ids]
        metrics = [one.metrics for one in self.llm.generate(asked, params, use_tqdm=False)]
        began = min(each.queued_ts for each in metrics)
        first = max(each.first_token_ts for each in metrics)
        ended = max(each.last_token_ts for each in metrics)
        return first - began, (ended - first) / max(1, outputs - 1)

    def read(self, count: int, context: int) -> float:
        """GB of a step of `count` sequences."""
        cost, spec = self.report.cost, self.report.kv_spec
        return (cost.step_bytes(count) + count * cost.kv_bytes(context, spec)) / 1e9

    def rows(self, prompts: list[int], limit: float) -> Iterator[Row]:
        self.seconds(1, 16, 2)  # pages in
        cost = self.report.cost
        step = statistics.median(self.seconds(1, 16, 33)[1] for _ in range(3))
        yield Row("decode alone", 1 / step, "read", self.read(1, 32))
        speed = 0.0
        for wanted in prompts:
            length = wanted if not speed else min(wanted, max(1024, int(limit * speed) // 1024 * 1024))
            took, step = self.seconds(1, length, 9)
            speed = length / took
            cut = "" if length == wanted else f"its first {length:,}"
            yield Row(
                f"prefill {wanted:,}", speed, "flop", cost.prompt_operations(length) / length / 1e9, cut
            )
        yield Row(f"decode after {wanted:,}", 1 / step, "read", self.read(1, length), cut)
        took, step = self.seconds(BATCH, LENGTH, SAMPLED)
        total = took + step * (LENGTH - 1)
        work = cost.prompt_operations(LENGTH) + (LENGTH - 1) * cost.decode_operations(LENGTH * 3 // 2)
        yield Row(
            f"{BATCH} x ({LENGTH} + {LENGTH})", BATCH * LENGTH / total, "flop", work / LENGTH / 1e9,
            f"from {SAMPLED} outputs each; a step reads {self.read(BATCH, LENGTH) / step:.1f} GB/s",
        )  # fmt: skip


def show(name: str, row: Row, limits: MachineLimits, dense: float | None) -> None:
    most = limits.read_gbs if row.limit == "read" else limits.peak_gflops
    used = row.rate * row.need
    unit = "GB/s" if row.limit == "read" else "GFLOP/s"
    cells = [
        name, row.task, f"{row.rate:.1f}", f"{used:.1f} of {most:.1f} {unit}", f"{used / most:.2f}",
        "" if dense is None else f"{row.rate / dense:.2f}", row.note,
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="words of a model and a type, as Qwen3.5 bf16")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompts", default="1024,16384")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--parts", type=int, default=1, help="take one PARTS-th of the layers, to try this script"
    )
    options = parser.parse_args()
    backend = make_backend(DeviceConfig(threads=options.threads))
    print("| model | task | tok/s | uses | share | dense | |\n|---|---|---|---|---|---|---|", flush=True)
    for kind, quantization in QUANTIZATIONS.items():
        for name in SHAPES:
            title = f"{name} {kind}"
            if not all(word in title for word in options.only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                config = shape(name, options.parts)
                hybrid = write(Path(folder, "hybrid"), config)
                dense = dense_beside(Path(folder, "dense"), config, hybrid)
                rates: dict[str, float] = {}
                for path in (dense, hybrid):
                    model = Model(path, quantization, options.threads)
                    limits = backend.measure_limits(model.report.arithmetic)
                    for row in model.rows(list(map(int, options.prompts.split(","))), options.seconds):
                        known = rates.setdefault(row.task, row.rate)
                        label = title if path is hybrid else f"dense beside {title}"
                        show(label, row, limits, known if path is hybrid else None)
                    model.llm.shutdown()


if __name__ == "__main__":
    main()
