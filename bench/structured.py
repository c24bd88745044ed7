"""How structured outputs do on real JSON schemas: accepted, compiled, masked, generated and checked.

    python bench/structured.py DATA [--model DIR] [--tokenizer DIR] [--sample 400] [--generate 60] [--seed 0]

DATA holds JSON lines (plain or .gz) with a "schema" each, for example the folder of JSONSchemaBench's MaskBench. Four
parts: every schema of a random sample is compiled, with the share of the accepted and the reasons of the others; a
part of the accepted ones is generated from, at temperature 1, and what finished is checked by `jsonschema`; masks are
timed over what was generated; and the time between tokens of 16 free requests with 16 constrained ones beside them is
put beside that with 16 more free ones, in turns. Without --model the model inside the package is used; random weights
are as good a test.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import vocabulary_of
from quire.params import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer


def read_schemas(folder: Path, count: int, seed: int) -> list[tuple[str, Any]]:
    """(id, schema) of a random sample over all files."""
    found = []
    for path in sorted(folder.glob("*.jsonl*")):
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
        found += [(record["id"], record["schema"]) for record in map(json.loads, lines)]
    return random.Random(seed).sample(found, min(count, len(found)))


def quantiles(seconds: list[float], scale: float) -> str:
    return " / ".join(f"{scale * float(np.quantile(seconds, q)):.2f}" for q in (0.5, 0.99)) + (
        f" (worst {scale * max(seconds):.1f})"
    )


def is_valid_schema(schema: Any) -> bool:
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


def compile_all(
    compiler: GrammarCompiler, schemas: list[tuple[str, Any]]
) -> list[tuple[str, Any, StructuredOutputsParams]]:
    """Compile each within the server's bounds; print what happened, return what was accepted."""
    accepted, seconds, reasons = [], [], Counter[str]()
    for name, schema in schemas:
        start = time.perf_counter()
        try:
            params = StructuredOutputsParams(json=schema)
            compiler.check(params)
            accepted.append((name, schema, params))
        except RequestError as error:
            kind = "unsupported" if is_valid_schema(schema) else "invalid schema"
            reasons[f"{kind}: {re.sub(r'[0-9]+', 'N', str(error))[:90]}"] += 1
        seconds.append(time.perf_counter() - start)
    print(f"schemas accepted: {len(accepted)} of {len(schemas)} ({len(accepted) / len(schemas):.1%})")
    print(f"compile and try out, ms p50 / p99: {quantiles(seconds, 1e3)}")
    for reason, count in reasons.most_common(12):
        print(f"  {count:4} {reason}")
    return accepted


def generate(
    llm: LLM, accepted: list[tuple[str, Any, StructuredOutputsParams]], max_tokens: int
) -> list[tuple[StructuredOutputsParams, list[int]]]:
    """Sample from each; print how many finished, how many of these are valid, and what jumping saved."""
    computed = 0

    def count(batch: Any) -> None:
        nonlocal computed
        computed += sum(1 for seq in batch.seqs if seq.wants_logits)

    llm._core.on_batch = count
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=max_tokens, structured_outputs=constraint)
        for i, (_, _, constraint) in enumerate(accepted)
    ]
    outputs = llm.generate(["Answer in JSON: "] * len(accepted), params, use_tqdm=False)
    llm._core.on_batch = None
    finished = valid = tokens = 0
    made = []
    for (name, schema, constraint), output in zip(accepted, outputs, strict=True):
        sample = output.outputs[0]
        tokens += len(sample.token_ids)
        made.append((constraint, sample.token_ids))
        if sample.finish_reason != "stop":
            continue
        finished += 1
        try:
            validator = jsonschema.validators.validator_for(schema)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(sample.text))
            valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"  INVALID {name}: {str(error).splitlines()[0][:120]}: {sample.text[:80]}")
    print(
        f"outputs: {len(outputs)}, finished within {max_tokens} tokens: {finished}, of these valid: {valid}"
    )
    print(
        f"tokens: {tokens}, forward passes for them: {computed} ({1 - computed / max(1, tokens):.1%} saved)"
    )
    return made


def time_masks(compiler: GrammarCompiler, made: list[tuple[StructuredOutputsParams, list[int]]]) -> None:
    mask_W = np.zeros((len(compiler.vocabulary.pieces) + 31) // 32, np.uint32)
    seconds = []
    for constraint, tokens in made:
        matcher = compiler.compile(compiler.check(constraint)).matcher()
        for token in tokens:
            if matcher.ended:
                break
            start = time.perf_counter()
            matcher.fill(mask_W)
            seconds.append(time.perf_counter() - start)
            if not mask_W[token // 32] >> (token % 32) & 1:
                break  # the end of the sequence
            matcher.advance(token)
    if seconds:
        print(f"masks: {len(seconds)}, us p50 / p99: {quantiles(seconds, 1e6)}")


def time_steps(llm: LLM, rounds: int = 7) -> None:
    """Steps of 16 free requests, each made of decodes alone: with 16 constrained ones beside them, and 16 free ones."""
    row = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    }
    table = {"type": "array", "items": {**row, "required": ["name", "age"]}, "minItems": 200}
    constraint = StructuredOutputsParams(json=table)
    free = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True)
    bound = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True, structured_outputs=constraint)
    steps: dict[str, list[float]] = {"free": [], "constrained": []}
    for turn in range(2 * rounds):
        kind = "constrained" if turn % 2 else "free"
        for i in range(32):
            params = bound if kind == "constrained" and i >= 16 else free
            llm._core.add(llm._front.request(f"{turn}/{i}", "Once upon a time", params))
        for step in range(60):
            start = time.perf_counter()
            llm._core.step()
            if turn >= 2 and step >= 10:
                steps[kind].append(time.perf_counter() - start)
        for i in range(32):
            llm._core.abort(f"{turn}/{i}")
        llm._core.step()
    alone, beside = (float(np.median(steps[kind])) for kind in ("free", "constrained"))
    print(f"step with 32 free: {alone * 1e3:.3f} ms; with 16 free and 16 constrained: {beside * 1e3:.3f} ms")
    print(f"  time between tokens {beside / alone - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokenizer", help="compile for this vocabulary alone, and generate nothing")
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--generate", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    schemas = read_schemas(options.data, options.sample, options.seed)
    if options.tokenizer:
        tokenizer = Tokenizer.load(Path(options.tokenizer))
        size = tokenizer.vocab_size
        compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer, size, ()))
        compiler.prepare()
        compile_all(compiler, schemas)
        return
    llm = LLM(options.model, max_model_len=options.max_tokens + 64)
    own = llm._grammars
    own.prepare()
    accepted = compile_all(own, schemas)[: options.generate]
    time_masks(own, generate(llm, accepted, options.max_tokens))
    time_steps(llm)


if __name__ == "__main__":
    main()
