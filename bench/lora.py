"""What adapters cost: tokens per second of decoding with adapters beside the base model, in turns in one process.

python bench/lora.py MODEL [--adapters 8] [--rank 16] [--batch 32] [--tokens 64] [--rounds 5] [--quantization int8]

Makes random adapters on all linear layers of the model. Each round decodes the same batch without adapters and with
every sequence on one of them; figures are medians over rounds. The first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire import LLM, LoRARequest, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes(config: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each target of a Llama-like layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv, inner = config["num_key_value_heads"] * size, config["intermediate_size"]
    outputs = (heads * size, kv, kv, hidden, inner, inner, hidden)
    inputs = (hidden, hidden, hidden, heads * size, hidden, hidden, inner)
    return dict(zip(TARGETS, zip(outputs, inputs, strict=True), strict=True))


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    config = json.loads((model / "config.json").read_text())
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for target, (out, width) in shapes(config).items():
            part = "self_attn" if target in TARGETS[:4] else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            tensors[f"{name}.lora_A.weight"] = (rng.standard_normal((rank, width)) * width**-0.5).astype("f4")
            tensors[f"{name}.lora_B.weight"] = (rng.standard_normal((out, rank)) * 0.01).astype("f4")
    folder.mkdir(parents=True)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")


def decode(llm: LLM, prompts: list[list[int]], tokens: int, adapters: list[LoRARequest | None]) -> float:
    """Seconds of a batch."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 1000, options.prompt).tolist() for _ in range(options.batch)]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.adapters):
            write_adapter(options.model, Path(folder) / str(seed), options.rank, seed)
        llm = LLM(
            str(options.model),
            enable_lora=True,
            max_loras=options.adapters,
            max_lora_rank=options.rank,
            max_model_len=options.prompt + options.tokens + 8,
            quantization=options.quantization,
        )
        named = [LoRARequest(str(i), i + 1, str(Path(folder) / str(i))) for i in range(options.adapters)]
        each = [named[i % len(named)] for i in range(options.batch)]
        rows = []
        for round in range(options.rounds + 1):
            base = decode(llm, prompts, options.tokens, [None] * options.batch)
            adapted = decode(llm, prompts, options.tokens, list(each))
            if round:
                rows.append((base, adapted, adapted / base))
        made = options.batch * options.tokens
        base, adapted, ratio = (statistics.median(values) for values in zip(*rows, strict=True))
        print(f"base      {made / base:8.1f} tokens/s")
        print(f"adapters  {made / adapted:8.1f} tokens/s ({options.adapters} of rank {options.rank})")
        print(
            f"cost      {(ratio - 1) * 100:8.1f} % (rounds: {', '.join(f'{(r - 1) * 100:.1f}' for *_, r in rows)})"
        )


if __name__ == "__main__":
    main()
