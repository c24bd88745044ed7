"""Train a LoRA adapter for another manner of writing, saved in the PEFT format.

    python lora.py --run RUN --base main --source shakespeare --steps 300 \
        --out ../src/quire/assets/quire-stories-lora-shakespeare
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from batches import Batches, Phase
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train import MICRO_TOKENS, keep_freed_memory, load_model

from model import Llama

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTH = 256


class LoraLinear(nn.Module):
    """A frozen matrix plus a low-rank change, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scale


def add_lora(model: Llama, rank: int, alpha: int) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in TARGETS:
                if hasattr(block, name):
                    setattr(block, name, LoraLinear(getattr(block, name), rank, alpha))


def save_adapter(model: Llama, rank: int, alpha: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"base_model.model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner alone
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "quire-stories",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: {sum(t.numel() for t in weights.values()):,} parameters")


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--base", default="main")
    parser.add_argument("--source", required=True, help="a file of RUN/tokens, without .npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load_model(args.run / f"{args.base}.pt")
    alpha = 2 * args.rank
    add_lora(model, args.rank, alpha)
    batches = Batches(args.run / "tokens", (Phase(0.0, LENGTH, {args.source: 1.0}),), seed=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    recent = 0.0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
            group["lr"] = args.lr * cosine * min(1, (step + 1) / 20)
        rows = batches.batch(step, 0.0, 0, MICRO_TOKENS)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recent = loss.item() if step == 0 else 0.95 * recent + 0.05 * loss.item()
        if step % 20 == 0:
            print(f"step {step} loss {recent:.3f}", flush=True)
    save_adapter(model, args.rank, alpha, args.out)


if __name__ == "__main__":
    main()
