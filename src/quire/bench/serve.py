"""`quire bench serve`: loads any OpenAI-compatible server; options and result keys are vLLM's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvloop
from rich.console import Console

from quire.bench.client import Client, Outcome, Target
from quire.bench.datasets import DatasetOptions, Sample, as_text, ideal_cached_tokens, load_samples
from quire.bench.lengths import fitted_lengths
from quire.bench.load import Api, Arrivals, Sent, send_all
from quire.bench.metrics import (
    Summary,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    spec_counters,
    spec_result,
)
from quire.bench.plot import need_matplotlib, plot_run, plot_sweep
from quire.bench.report import cost_per_million
from quire.bench.tables import latency_table, load_table
from quire.cli import Command
from quire.config import check_options, option
from quire.errors import ConfigError, EngineError
from quire.flags.table import vllm_flags
from quire.progress import progress, untold
from quire.serve.keys import client_key, key_advice
from quire.serve.system_limits import raise_descriptor_limit
from quire.text.tokenizer import Tokenizer
from quire.weights.hub import find_model, open_tokenizer

DETAILED = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times",
            "generated_texts", "errors")  # fmt: skip
MAX_ERRORS_SHOWN = 5
LATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(DatasetOptions):
    """Options of `quire bench serve`; names are vLLM's."""

    backend: Literal["openai", "openai-chat", "vllm"] = option(
        "openai", "API: completions (openai, vllm) or chat."
    )
    base_url: str | None = option(None, "URL of the server; overrides host and port.")
    host: str = option("127.0.0.1", "The server's host.")
    port: int = option(8000, "The server's port.", low=1, high=65535)
    endpoint: str | None = option(None, "Path of the endpoint; default is the backend's.")
    model: str | None = option(None, "Name of the model; default is the first that the server lists.")
    served_model_name: str | None = option(None, "Name to request, if --model is a directory.")
    api_key: str | None = option(
        None, "Key of the server; a file keeps it out of the process list.", replaces=("api_key_file",)
    )
    api_key_file: str | None = option(None, "File with the key of the server.", replaces=("api_key",))
    header: tuple[str, ...] = option((), "Extra header, NAME=VALUE; repeat for several.")
    insecure: bool = option(False, "Do not verify the TLS certificate.")
    request_rate: float = option(float("inf"), "Requests per second; inf sends all at once.")
    burstiness: float = option(1.0, "1 is Poisson, less is burstier, more is more even.")
    max_concurrency: int | None = option(None, "Most requests in flight.", low=1)
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(None, "How the rate grows.")
    ramp_up_start_rps: float | None = option(None, "Rate at the start.")
    ramp_up_end_rps: float | None = option(None, "Rate at the end.")
    self_timed: bool | None = option(None, "Send at the dataset's times; on by default for timed_trace.")
    num_warmups: int = option(0, "Warm-up requests.", low=0)
    ignore_eos: bool = option(False, "Generate exactly the wanted number of tokens.")
    temperature: float | None = option(
        None, "Temperature; 0 takes the likeliest token. Default is the server's."
    )
    top_p: float | None = option(None, "Keep the smallest set of tokens with this probability.")
    top_k: int | None = option(None, "Keep this many of the likeliest tokens.")
    min_p: float | None = option(None, "Keep tokens at least this fraction as likely as the best.")
    frequency_penalty: float | None = option(
        None, "Subtracted from a token's logit once per occurrence in the output."
    )
    presence_penalty: float | None = option(None, "Subtracted from the logits of tokens that the output has.")
    repetition_penalty: float | None = option(None, "Divides the logits of tokens that prompt or output has.")
    logprobs: int | None = option(None, "Log probabilities to request per token.", low=0)
    extra_body: str | None = option(None, "JSON object to merge into each request.")
    goodput: tuple[str, ...] = option((), 'Objectives in ms, like "ttft:200 tpot:50 e2el:5000".')
    percentile_metrics: str | None = option(
        None, "Metrics to report; default ttft,tpot,itl,itl_prefill,e2el."
    )
    metric_percentiles: str = option("99", "Percentiles to report, separated by commas.")
    sweep: str | None = option(None, "Measure at each of these loads, like 1,2,4,inf.")
    sweep_over: Literal["request-rate", "max-concurrency"] = option(
        "request-rate", "The option that the sweep varies."
    )
    plot: str | None = option(
        None, "Plot to write: latency over load with a sweep, else over time.", writes="file"
    )
    save_result: bool = option(False, "Write the result as JSON.")
    save_detailed: bool = option(False, "Include the figures of each request.")
    append_result: bool = option(False, "Append the result to the file as one line.")
    result_dir: str | None = option(None, "Directory of the result file.", writes="directory")
    result_filename: str | None = option(None, "Name of the result file.")
    label: str | None = option(None, "Label of the result; default is the backend.")
    metadata: tuple[str, ...] = option((), "NAME=VALUE to keep in the result; repeat for several.")
    ready_check_timeout_sec: int = option(30, "Seconds to wait for the server; 0 does not wait.", low=0)
    price_per_hour: float | None = option(
        None, "Price of the server: adds the cost of a million tokens.", low=0
    )
    request_timeout_sec: float = option(21600.0, "Seconds after which a request counts as failed.", low=0.001)
    disable_tqdm: bool = option(False, "Show no progress.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.ramp_up_strategy not in (None, "linear", "exponential"):
            raise ConfigError(
                f"--ramp-up-strategy must be linear or exponential, got {self.ramp_up_strategy!r}"
            )
        object.__setattr__(self, "api_key", client_key(self.api_key, self.api_key_file))
        object.__setattr__(self, "api_key_file", None)  # read once: it may be a pipe
        self.summary()
        self.arrivals()
        self.loads()

    @property
    def timed(self) -> bool:
        return self.dataset_name == "timed_trace" if self.self_timed is None else self.self_timed

    def target(self) -> Target:
        """The server and the headers to send."""
        headers = _pairs(self.header, "header")
        if self.api_key:
            headers.setdefault("Authorization", f"Bearer {self.api_key}")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Target.from_url(self.base_url or f"http://{host}:{self.port}", headers, self.insecure)

    def api(self, model: str) -> Api:
        chat = self.backend == "openai-chat"
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
                 "repetition_penalty")  # fmt: skip
        params = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ignore_eos:
            params["ignore_eos"] = True
        if self.logprobs is not None:
            params.update(
                {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
            )
        endpoint = self.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
        return Api(endpoint, chat, model, {**params, **_json_object(self.extra_body)})

    def arrivals(self) -> Arrivals:
        return Arrivals(
            rate=self.request_rate,
            burstiness=self.burstiness,
            ramp_up=self.ramp_up_strategy,
            start=self.ramp_up_start_rps,
            end=self.ramp_up_end_rps,
        )

    def summary(self) -> Summary:
        metrics = parse_metrics(self.percentile_metrics or "ttft,tpot,itl,itl_prefill,e2el")
        if self.max_concurrency is not None and self.percentile_metrics is None:
            metrics.append("client_queue_time")
        return Summary(metrics, parse_percentiles(self.metric_percentiles), parse_goodput(self.goodput))

    def loads(self) -> list[ServeOptions]:
        """Repeat the options for each load of the sweep, each with its own seed, so that synthetic prompts are new to
        the server's cache. Without a sweep, return only these."""
        if self.sweep is None:
            return [self]
        if self.timed and self.sweep_over == "request-rate":
            raise ConfigError(
                "a timed trace sets the rate: use --sweep-over max-concurrency or --no-self-timed"
            )
        try:
            values = [float(v) for v in self.sweep.split(",") if v.strip()]
            if self.sweep_over == "max-concurrency":
                counts = [int(v) for v in values]
                changes: list[dict[str, Any]] = [{"max_concurrency": n} for n in counts]
            else:
                changes = [{"request_rate": v} for v in values]
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"--sweep must be numbers separated by commas, got {self.sweep!r}") from error
        if not changes:
            raise ConfigError("--sweep is empty")
        return [replace(self, sweep=None, seed=self.seed + i, **change) for i, change in enumerate(changes)]


def run(options: ServeOptions) -> None:
    if options.plot is not None:
        need_matplotlib()
    raise_descriptor_limit()
    results = uvloop.run(_measure_all(options))
    if options.plot is not None:
        if options.sweep is None:
            plot_run(results[0], Path(options.plot))
        else:
            plot_sweep(results, options.sweep_over.replace("-", "_"), Path(options.plot))
    if not any(r["completed"] for r in results):
        raise EngineError("all requests failed; the first errors are above")


async def _measure_all(options: ServeOptions) -> list[dict[str, Any]]:
    client = Client(options.target(), options.request_timeout_sec)
    try:
        served = await _served(client, options)
        results = []
        for load in options.loads():
            results.append(await _Run(load, client, served).measure())
            if options.save_result or options.append_result:
                _save(options, results)
        return results
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class _Served:
    """The server's model; `root` is the path of its files on the server's machine."""

    name: str
    root: str | None
    max_model_len: int | None


async def _served(client: Client, options: ServeOptions) -> _Served:
    """Wait for the server, and return the model to request, as the server lists it."""
    end, waiting = time.monotonic() + options.ready_check_timeout_sec, False
    while True:
        try:
            status, body = await client.get("/v1/models")
            if status < 500 or time.monotonic() > end:
                break
        except EngineError:
            if time.monotonic() > end:
                raise
        if not waiting:
            print(f"waiting for {client.target.url} ...", file=sys.stderr)
            waiting = True
        await asyncio.sleep(0.25)
    wanted = options.served_model_name or options.model
    if status == 401:
        raise EngineError(f"{client.target.url}: {key_advice(options.api_key)}")
    if status != 200:
        if wanted is None:
            raise EngineError(f"{client.target.url}/v1/models answered {status}: pass --model NAME")
        return _Served(wanted, None, None)
    try:
        cards = json.loads(body)["data"]
        card: dict[str, Any] = next(
            (c for c in cards if c["id"] == wanted), cards[0] if wanted is None else {"id": wanted}
        )
        return _Served(card["id"], card.get("root"), card.get("max_model_len"))
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(
            f"{client.target.url}/v1/models is not OpenAI's list of models: {error!r}"
        ) from error


class _Run:
    """Measures one load on one server."""

    def __init__(self, options: ServeOptions, client: Client, served: _Served) -> None:
        if options.dataset_name == "random" and served.max_model_len:
            options = _fitted(options, served.max_model_len)
        self.options, self.client, self.served = options, client, served
        self.api = options.api(served.name)
        self.tokenizer = _tokenizer(options, served)
        self.made = self.samples = load_samples(options, self.tokenizer)
        if self.api.chat and self.tokenizer is not None:
            self.samples = as_text(self.samples, self.tokenizer)
        elif self.api.chat and not all(isinstance(s.prompt, str) for s in self.samples):
            raise ConfigError("chat takes text, but these prompts are token ids: pass --tokenizer DIR")
        self.notes: list[str] = []

    async def measure(self) -> dict[str, Any]:
        options, samples = self.options, self.samples
        longest = max(s.prompt_len + s.output_len for s in samples)
        if self.served.max_model_len and longest > self.served.max_model_len:
            self.notes.append(
                f"the longest request has {longest} tokens, but the server takes {self.served.max_model_len}"
                + (": try --trace-length-scale" if options.dataset_name == "timed_trace" else "")
            )
        for _ in range(options.num_warmups):
            outcome = Outcome()
            await self.client.stream(self.api.endpoint, self.api.body(samples[0]), outcome)
            if not outcome.ok:
                raise EngineError(f"the warm-up request failed: {outcome.error}")
        if options.timed and all(s.timestamp is not None for s in samples):
            times = [s.timestamp or 0.0 for s in samples]
        elif options.timed:
            raise ConfigError(f"--self-timed needs a dataset with times, but {options.dataset_name} has none")
        else:
            times = options.arrivals().times(len(samples), np.random.default_rng([options.seed, 1]))
        before = await self._counters()
        sent = await self._send(times)
        result = self._result(sent)
        result.update(spec_result(before, await self._counters()))
        self._show(result)
        return result

    async def _send(self, times: Sequence[float]) -> Sent:
        count = len(self.samples)
        quiet = self.options.disable_tqdm
        with nullcontext(untold) if quiet else progress("load", count, "requests") as told:
            return await send_all(
                self.client, self.api, self.samples, times, self.options.max_concurrency, lambda _: told(1)
            )

    def _result(self, sent: Sent) -> dict[str, Any]:
        options, outcomes = self.options, sent.outcomes
        lens = [self._output_len(o) for o in outcomes]
        result: dict[str, Any] = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": options.backend,
            "backend": options.backend,
            "label": options.label or options.backend,
            "model_id": self.served.name,
            "tokenizer_id": options.tokenizer or self.served.name,
            "num_prompts": len(outcomes),
            **_pairs(options.metadata, "metadata"),
            "request_rate": "inf" if np.isinf(options.request_rate) else options.request_rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            **options.summary().result(self.samples, outcomes, lens, sent.duration),
            "client_cpu_s": sent.cpu,
        }
        if options.ramp_up_strategy:
            result |= {
                name: getattr(options, name)
                for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            }
        if options.price_per_hour is not None and result["output_throughput"]:
            cost = cost_per_million(options.price_per_hour, result["output_throughput"])
            result["cost_per_million_tokens"] = cost
        result |= self._prefix_cache(self.made, outcomes, result["total_input_tokens"])
        hit, ideal = result["prefix_hit_rate"], result["ideal_prefix_hit_rate"]
        if hit is not None and ideal is not None and hit > ideal + 0.02:
            self.notes.append(
                "the server had cached some of these prompts before: pass another --seed, or reset its cache"
            )
        self._note(sent, lens)
        return result

    def _output_len(self, outcome: Outcome) -> int:
        """Take the server's count of output tokens, else the tokenizer's, else one per piece."""
        if not outcome.ok:
            return 0
        if outcome.output_tokens is not None:
            return outcome.output_tokens
        if self.tokenizer is not None:
            return len(self.tokenizer.encode(outcome.text, add_special_tokens=False))
        return len(outcome.itls) + 1

    def _prefix_cache(self, samples: list[Sample], outcomes: list[Outcome], total_in: int) -> dict[str, Any]:
        """Report cached prompt tokens as the server counts them, and the share that an infinite cache would hit of the
        completed requests, known only for prompts of ids."""
        done = [(s, o) for s, o in zip(samples, outcomes, strict=True) if o.ok]
        cached = [o.cached_tokens for _, o in done if o.cached_tokens is not None]
        prompts = [s.prompt.tolist() for s, _ in done if not isinstance(s.prompt, str)]
        total = sum(cached) if cached else None
        return {
            "total_cached_tokens": total,
            "prefix_hit_rate": None if total is None else total / max(1, total_in),
            "ideal_prefix_hit_rate": ideal_cached_tokens(prompts) / sum(map(len, prompts))
            if prompts
            else None,
        }

    def _note(self, sent: Sent, lens: list[int]) -> None:
        good = [(s, o, n) for s, o, n in zip(self.samples, sent.outcomes, lens, strict=True) if o.ok]
        short = sum(n != s.output_len for s, _, n in good)
        if self.options.ignore_eos and short:
            self.notes.append(
                f"{short} requests generated fewer tokens than wanted, although EOS was ignored"
            )
        if any(o.output_tokens is None for _, o, _ in good):
            counted = "the tokenizer" if self.tokenizer else "the pieces of the stream"
            self.notes.append(f"the server reports no usage: output tokens were counted by {counted}")
        if sent.lag > LATE:
            self.notes.append(
                f"this client sent up to {sent.lag * 1e3:.0f} ms late: the load was less even than asked"
            )
        if sent.cpu > 0.9 * sent.duration:
            self.notes.append("this client used a whole core: some of the latency may be its own")

    async def _counters(self) -> dict[str, float]:
        """Read the counters of speculative decoding, if the server has metrics."""
        status, body = await self.client.get("/metrics")
        return spec_counters(body.decode(errors="replace")) if status == 200 else {}

    def _show(self, result: dict[str, Any]) -> None:
        out = Console()
        for error in [e for e in result["errors"] if e][:MAX_ERRORS_SHOWN]:
            out.print(f"failed: {error}", markup=False, soft_wrap=True)
        if not result["completed"]:
            return
        out.print(load_table(result, self.options.dataset_name, self.options.timed))
        out.print(latency_table(result, self.options.summary().metrics))
        for note in self.notes:
            out.print(f"note: {note}", markup=False, soft_wrap=True)


def _fitted(options: ServeOptions, longest: int) -> ServeOptions:
    """Fit the lengths of random prompts to the server's model."""
    prefix, own = options.random_prefix_len, options.input_len or options.random_input_len
    prompt, output = fitted_lengths(prefix + own, options.output_len or options.random_output_len, longest)
    prefix = min(prefix, prompt - 1)
    return replace(
        options,
        input_len=None,
        output_len=None,
        random_prefix_len=prefix,
        random_input_len=prompt - prefix,
        random_output_len=output,
    )


def _save(options: ServeOptions, results: list[dict[str, Any]]) -> None:
    """Write the last result as JSON: to a file of its own, or as a line behind earlier loads or --append-result."""
    first = results[0]
    rate = "sweep" if options.sweep else f"{first['request_rate']}qps"
    limit = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    name = (
        options.result_filename
        or f"{first['label']}-{rate}{limit}-{Path(first['model_id']).name}-{first['date']}.json"
    )
    path = Path(options.result_dir or ".") / name
    kept = {k: v for k, v in results[-1].items() if options.save_detailed or k not in DETAILED}
    later = len(results) > 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if options.append_result or later else "w", encoding="utf-8") as file:
            file.write(json.dumps(kept) + "\n")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error}") from error
    if not later:
        print(f"saved {path}")


def _tokenizer(options: ServeOptions, served: _Served) -> Tokenizer | None:
    """Load the named tokenizer, else the served model's, if its directory is on this machine."""
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    for place in (options.model, served.root):
        if place and Path(place).exists():
            return open_tokenizer(find_model(place, weights=False))
    return None


def _pairs(texts: tuple[str, ...], flag: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--{flag} must be NAME=VALUE, got {text!r}")
        pairs[name.strip()] = value.strip()
    return pairs


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return value


COMMAND = Command(run, ServeOptions, uses=frozenset(), foreign=lambda: vllm_flags("bench serve"))
