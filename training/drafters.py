"""Train a drafter for a model on text that the model wrote (rollouts.py). The model itself does not change.

    python training/drafters.py --kind eagle3 --model src/quire/assets/quire-stories \
        --rollouts RUN/rollouts.npy --out RUN/quire-stories-eagle3

`--kind` is eagle3, mtp or mlp. Each step of a chain learns the target's distribution after the chain's earlier tokens.
At the end it prints how often the likeliest token of each step is the target's, on rows that were not trained on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import MTP, Eagle3, MLPSpeculator, Read, Sizes
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TAPS = [2, 4, 6]  # each id names the layer that reads the tapped state; 6 is behind the last layer
DRAFT_VOCAB = 1024
MLP_INNER = 40
HELD = 64
STEP_WEIGHT = 0.8
EVERY = 2  # chains start at one of so many slots


class Target:
    """A frozen Llama-like model of transformers."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.embedding = self.model.get_input_embeddings().weight
        self.head = self.model.get_output_embeddings().weight
        self.layers = self.model.model.layers
        self._outputs: list[Tensor] = []
        for tap in TAPS:
            self.layers[tap - 1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs.append(output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def read(self, rows: Tensor) -> Read:
        self._outputs.clear()
        final = self.model.model(rows).last_hidden_state
        return Read(tuple(self._outputs), final, final @ self.head.T)

    def sizes(self) -> Sizes:
        c = self.model.config
        theta = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
        return Sizes(c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                     c.vocab_size, c.rms_norm_eps, float(theta))  # fmt: skip


def wanted(read: Read, slots: Tensor, step: int, ids: Tensor | None) -> Tensor:
    """The target's logits for the token that step `step` of the chains guesses, over the drafter's vocabulary."""
    logits = read.logits[:, slots + 1 + step]
    return logits if ids is None else logits[..., ids]


def right(drafter: Any, target: Target, rows: Tensor, ids: Tensor | None) -> list[float]:
    """How often each step's likeliest token is the target's, among all tokens."""
    slots, hits = torch.arange(rows.shape[1] - drafter.steps - 1), torch.zeros(drafter.steps)
    with torch.no_grad():
        for some in rows.split(8):
            read = target.read(some)
            for step, logits in enumerate(drafter(read, some, target.embedding, slots)):
                best = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
                hits[step] += (best == read.logits[:, slots + 1 + step].argmax(-1)).sum()
    return [round(hit / (len(rows) * len(slots)), 3) for hit in hits.tolist()]


def layer_config(target: Target) -> dict[str, Any]:
    s = target.sizes()
    return {
        "model_type": "llama", "hidden_size": s.width, "intermediate_size": s.inner, "num_hidden_layers": 1,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
        "vocab_size": s.vocab, "rms_norm_eps": s.eps, "rope_theta": s.theta, "hidden_act": "silu",
        "max_position_embeddings": target.model.config.max_position_embeddings, "tie_word_embeddings": False,
    }  # fmt: skip


def save(drafter: Any, target: Target, verifier: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.detach().to(torch.bfloat16) if t.is_floating_point() else t).contiguous().clone()
        for name, t in drafter.tensors().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    method = {"proposal_type": "greedy", "speculative_tokens": drafter.steps - 1, "verifier_accept_k": 1,
              "accept_tolerance": 0.0}  # fmt: skip
    library = {"algorithm": "eagle3" if isinstance(drafter, Eagle3) else "mtp", "default_proposal_method": "greedy",
               "proposal_methods": [method],
               "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}}  # fmt: skip
    config = drafter.config(layer_config(target), TAPS, library)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: {sum(t.numel() for t in tensors.values()):,} numbers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("eagle3", "mtp", "mlp"), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--verifier", default="../quire-stories", help="the target, seen from --out")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    target = Target(args.model)
    rows = torch.from_numpy(np.load(args.rollouts).astype(np.int64))
    held, rows = rows[:HELD], rows[HELD:]
    ids = None
    if args.kind == "eagle3":
        ids = (
            torch.bincount(rows.flatten(), minlength=target.sizes().vocab)
            .topk(DRAFT_VOCAB)
            .indices.sort()
            .values
        )
        drafter: Any = Eagle3(target.sizes(), len(TAPS), ids)
        drafter.lm_head.weight.data.copy_(target.head[ids])
    elif args.kind == "mtp":
        drafter = MTP(target.sizes(), target.head)
    else:
        drafter = MLPSpeculator(target.sizes(), MLP_INNER)
    optimizer = torch.optim.AdamW(drafter.parameters(), args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 30, 0.02 + 1.5 * (1 - share))
        some = rows[torch.randint(len(rows), (args.rows,))]
        slots = torch.arange(int(torch.randint(EVERY, ())), rows.shape[1] - drafter.steps - 1, EVERY)
        read = target.read(some)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), wanted(read, slots, i, ids).flatten(0, 1).softmax(-1))
            for i, logits in enumerate(drafter(read, some, target.embedding, slots))
        ]
        loss = sum(STEP_WEIGHT**i * each for i, each in enumerate(losses))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, {share:.0%}:", [round(each.item(), 3) for each in losses], flush=True)
        step, share = step + 1, (time.monotonic() - began) / (60 * args.minutes)
    print("right on held-out rows, by step:", right(drafter, target, held, ids))
    save(drafter, target, args.verifier, args.out)


if __name__ == "__main__":
    main()
