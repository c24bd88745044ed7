"""Write stories with stories260K, the public MIT model, to widen the small amount of real story text.

    python teacher.py --checkpoint ../shared/data/ckpt-stories260K/hf --out RUN/teacher-0.txt --megabytes 8

The teacher is tiny (260k parameters), so a plain batched forward pass with a key/value cache writes
tens of megabytes on a CPU in minutes. Stories that the teacher does not finish are thrown away.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

BOS, EOS = 1, 2  # the teacher ends a story with either of them


class Teacher:
    """The forward pass of a small Llama checkpoint, one position at a time for many rows at once."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.context: int = config["max_position_embeddings"]
        half = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(self.context)[:, None] * config["rope_theta"] ** -half[None]
        self.cos, self.sin = angles.cos(), angles.sin()

    def new_cache(self, rows: int) -> Tensor:
        return torch.zeros(self.layers, 2, rows, self.kv_heads, self.context, self.head_dim)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[position], self.sin[position]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def step(self, tokens: Tensor, position: int, cache: Tensor) -> Tensor:
        """Logits for the token after `tokens`, which all stand at `position`; fills the cache."""
        w = self.weights
        rows = len(tokens)
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            h = F.rms_norm(x, (x.shape[-1],), w[name + "input_layernorm.weight"], self.eps)
            q = (h @ w[name + "self_attn.q_proj.weight"].T).view(rows, self.heads, self.head_dim)
            k = (h @ w[name + "self_attn.k_proj.weight"].T).view(rows, self.kv_heads, self.head_dim)
            v = (h @ w[name + "self_attn.v_proj.weight"].T).view(rows, self.kv_heads, self.head_dim)
            cache[layer, 0, :, :, position] = self._rotate(k, position)
            cache[layer, 1, :, :, position] = v
            # The query heads that share a key head are laid out as query rows of that head.
            q = self._rotate(q, position).view(rows, self.kv_heads, -1, self.head_dim)
            keys, values = cache[layer, :, :, :, : position + 1]
            out = F.scaled_dot_product_attention(q, keys, values)
            x = x + out.reshape(rows, -1) @ w[name + "self_attn.o_proj.weight"].T
            h = F.rms_norm(x, (x.shape[-1],), w[name + "post_attention_layernorm.weight"], self.eps)
            gate = F.silu(h @ w[name + "mlp.gate_proj.weight"].T)
            x = x + (gate * (h @ w[name + "mlp.up_proj.weight"].T)) @ w[name + "mlp.down_proj.weight"].T
        x = F.rms_norm(x, (x.shape[-1],), w["model.norm.weight"], self.eps)
        return x @ w["model.embed_tokens.weight"].T


@torch.inference_mode()
def sample_stories(
    teacher: Teacher, rows: int, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """Token ids of the stories that ended within the teacher's context, from one batch of `rows`."""
    cache = teacher.new_cache(rows)
    written = torch.zeros(rows, teacher.context, dtype=torch.long)
    tokens = torch.full((rows,), BOS)
    finished: list[list[int]] = []
    alive = torch.ones(rows, dtype=torch.bool)
    for position in range(teacher.context - 1):
        logits = teacher.step(tokens, position, cache)
        tokens = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)[:, 0]
        written[:, position] = tokens
        ended = alive & ((tokens == BOS) | (tokens == EOS))
        finished += [written[row, :position].tolist() for row in ended.nonzero()[:, 0].tolist()]
        alive &= ~ended
        if not alive.any():
            break
        if alive.sum() < 0.75 * len(alive):  # dropping finished rows pays for the copy
            cache, written, tokens = cache[:, :, alive], written[alive], tokens[alive]
            alive = torch.ones(len(tokens), dtype=torch.bool)
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.75)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    teacher = Teacher(args.checkpoint)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    generator = torch.Generator().manual_seed(args.seed)
    size, start = 0, time.monotonic()
    with args.out.open("w", encoding="utf-8") as file:
        while size < args.megabytes * 1e6:
            for ids in sample_stories(teacher, args.rows, args.temperature, generator):
                text = tokenizer.decode(ids).strip()
                size += file.write(text + "\n<|endoftext|>\n")
            file.flush()
            print(f"{size / 1e6:.2f} MB in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
