"""Measures what a long prompt does to others, by the target of a step: bench/results/latency/NAME.json and a plot.

    python bench/latency.py --model DIR --name zen5 --targets 25,50,100,200,400,0
    python bench/latency.py --plot zen5              draw bench/plots/latency-zen5.svg anew

Each target gets a server of its own. One client reads a stream, another sends prompts of --long tokens one after the
other, and a third one sends a prompt of 20 tokens every 2 seconds. A long prompt and the stream also run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.client import Client, Outcome, Target
from quire.bench.datasets import Sample
from quire.bench.load import Api

HERE = Path(__file__).parent
SHORT, SHORT_EVERY, ALONE = 20, 2.0, 3.0
STREAM_TOKENS = 4000


class Load:
    """Requests of random token ids to one server."""

    def __init__(self, port: int, vocabulary: int, seed: int) -> None:
        self.client = Client(Target.from_url(f"http://127.0.0.1:{port}"), 3600.0)
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self.api = Api("/v1/completions", False, "m", {"temperature": 0, "ignore_eos": True})

    async def send(self, length: int, output: int, outcome: Outcome | None = None) -> Outcome:
        outcome = outcome or Outcome()
        prompt = self.rng.integers(10, self.vocabulary, length)
        await self.client.stream(self.api.endpoint, self.api.body(Sample(prompt, length, output)), outcome)
        if not outcome.ok:
            raise SystemExit(f"a request failed: {outcome.error}")
        return outcome


async def scenario(port: int, args: argparse.Namespace) -> dict[str, Any]:
    load = Load(port, args.vocabulary, args.seed)
    await load.send(300, 8)  # the engine learns what steps cost
    alone = await load.send(args.long, 1)
    stream = Outcome()
    reading = asyncio.create_task(load.send(64, STREAM_TOKENS, stream))
    await asyncio.sleep(ALONE)
    began, quiet = time.perf_counter(), len(stream.itls)
    longs: list[float] = []
    shorts: list[asyncio.Task[Outcome]] = []

    async def prompts() -> None:
        for _ in range(args.count):
            longs.append((await load.send(args.long, 1)).ttft)

    sending = asyncio.create_task(prompts())
    while not sending.done():
        await asyncio.wait([sending], timeout=SHORT_EVERY)
        if not sending.done():
            shorts.append(asyncio.create_task(load.send(SHORT, 4)))
    await sending
    seconds, gaps = time.perf_counter() - began, stream.itls[quiet:]
    ttfts = [outcome.ttft for outcome in await asyncio.gather(*shorts)]
    reading.cancel()
    load.client.close()
    own = float(np.median(stream.itls[1:quiet])) if quiet > 1 else 0.0
    # The stream's own share: what its tokens would have taken alone.
    return {
        "alone_itl_ms": 1e3 * own,
        "alone_prompt_s": alone.ttft,
        "itl_ms": _spread(gaps, 1e3),
        "prompt_s": _spread(longs, 1.0),
        "short_ttft_ms": _spread(ttfts, 1e3),
        "stream_tokens": len(gaps),
        "prompt_tok_s": args.count * args.long / seconds,
        "slowdown": (seconds - own * len(gaps)) / (args.count * alone.ttft),
    }


def _spread(values: list[float], unit: float) -> dict[str, float]:
    found = np.array(values or [0.0]) * unit
    return {"p50": float(np.median(found)), "p99": float(np.percentile(found, 99)), "max": float(found.max())}


def draw(name: str) -> None:
    """Plot the time between a stream's tokens (log scale) against the rate of the prompts beside it, by target."""
    run = json.loads((HERE / "results" / "latency" / f"{name}.json").read_text())
    rows = sorted(run["rows"], key=lambda row: row["target_ms"] or math.inf)
    times = [row["itl_ms"][key] for row in rows for key in ("p50", "p99")]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    top = 1.1 * max(row["prompt_tok_s"] for row in rows)

    def x(rate: float) -> float:
        return 70 + 610 * rate / top

    def y(ms: float) -> float:
        return 330 - 280 * (math.log10(ms) - low) / (high - low)

    parts = [text(10, 22, f"{run['model']}, prompts of {run['long']:,} tokens beside a stream: {name}", 14)]
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(
            f'<path d="M70 {at:.0f}H680" stroke="#e4e7ec"/>'
            + text(62, at + 4, f"{10**exponent:,}", 11, "end")
        )
    for tick in range(0, int(top), 10 * round(top / 50) or 1):
        parts.append(text(x(tick), 348, f"{tick}", 11, "middle"))
    parts.append(text(375, 372, "prompt tokens per second", 11, "middle"))
    parts.append(text(70, 44, "ms between tokens of the stream: median and 99th percentile", 11))
    for key, colour in (("p50", "#2f6fed"), ("p99", "#c2410c")):
        points = [(x(row["prompt_tok_s"]), y(row["itl_ms"][key]), row["target_ms"]) for row in rows]
        line = " ".join(f"{a:.0f},{b:.0f}" for a, b, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b, target in points:
            parts.append(f'<circle cx="{a:.0f}" cy="{b:.0f}" r="4" fill="{colour}"/>')
            if key == "p99":
                parts.append(text(a, b - 9, f"{target:g}" if target else "no target", 11, "middle"))
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="385" font-family="sans-serif">'
    svg = "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
    (HERE / "plots" / f"latency-{name}.svg").write_text(svg)


def text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def measure(target: float, args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire.cli", "serve", args.model, "--port", str(port), "--served-model-name", "m",
               "--threads", str(args.threads), *([] if target < 0 else ["--target-step-time", str(target)]),
               "--log-level", "warning", "--disable-uvicorn-access-log", *args.options]  # fmt: skip
    server = subprocess.Popen(command)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        time.sleep(1.0)
        return {"target_ms": target, **asyncio.run(scenario(port, args))}
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--plot", default="", help="only draw the plot of a run of that name")
    parser.add_argument("--name", default="", help="name of the machine; without one nothing is written")
    parser.add_argument("--targets", default="0,50,100,200,400", help="milliseconds; 0 sets no limit")
    parser.add_argument("--long", type=int, default=8000)
    parser.add_argument("--count", type=int, default=2, help="long prompts, one after the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="further options of quire serve, after --")
    args = parser.parse_args()
    if args.plot:
        draw(args.plot)
        return
    if not args.model:
        parser.error("--model is missing")
    rows = []
    for target in map(float, args.targets.split(",")):
        rows.append(measure(target, args))
        print(json.dumps(rows[-1]), flush=True)
    if args.name:
        path = HERE / "results" / "latency" / f"{args.name}.json"
        path.parent.mkdir(exist_ok=True)
        kept = {
            k: v for k, v in vars(args).items() if k not in ("model", "name", "plot", "targets", "options")
        }
        kept |= {"model": Path(args.model).name, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")
        draw(args.name)


if __name__ == "__main__":
    main()
