"""Train an MLP speculator (IBM's layout, arXiv:2404.19124) for a model, on plain text.

python training/speculator.py --model src/quire/assets/quire-stories --text stories.txt --out RUN/speculator

Stage i reads the state of stage i - 1 (the first: the model's final hidden state) and one more token, and predicts the
token after it. The model itself does not change. At the end it prints how often each stage is right on held-out text.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

STAGES = 3


class Speculator(nn.Module):
    """Stages that share all weights but the first projection (tie_weights)."""

    def __init__(self, width: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, inner)
        self.first = nn.Linear(width, inner, bias=False)
        self.later = nn.Linear(inner, inner, bias=False)
        self.head = nn.Linear(inner, vocab, bias=False)
        self.weight = nn.Parameter(torch.ones(inner))
        self.bias = nn.Parameter(torch.zeros(inner))
        self.state_weight = 0.5 ** (0.5 / STAGES)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)
        nn.init.normal_(self.emb.weight, std=inner**-0.5)
        nn.init.normal_(self.head.weight, std=inner**-0.5)

    def forward(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """hidden [T, width] and the tokens after each position [T, STAGES] -> logits of each stage [T, vocab]."""
        state = rms(hidden) / math.sqrt(2)  # scale_input
        found = []
        for stage in range(STAGES):
            state = (self.later if stage else self.first)(state)
            state = state + self.token_weight / self.state_weight * self.emb(tokens[:, stage])
            state = F.gelu(rms(state) * self.weight + self.bias)
            found.append(self.head(state))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """As IBM's checkpoints store them: tied tensors once for each stage."""
        found = {}
        for i in range(STAGES):
            found[f"speculator.emb.{i}.weight"] = self.emb.weight
            found[f"speculator.proj.{i}.weight"] = self.later.weight if i else self.first.weight
            found[f"speculator.head.{i}.weight"] = self.head.weight
            found[f"speculator.ln.{i}.weight"], found[f"speculator.ln.{i}.bias"] = self.weight, self.bias
        return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in found.items()}


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def states(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states, the tokens that stages read, and those that they predict, of whole rows of text."""
    with torch.no_grad():
        hidden = model.model(rows).last_hidden_state
    count = rows.shape[1] - STAGES - 1
    windows = rows[:, 1:].unfold(1, STAGES + 1, 1)[:, :count]
    flat = windows.reshape(-1, STAGES + 1)
    return hidden[:, :count].reshape(-1, hidden.shape[-1]), flat[:, :-1], flat[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inner", type=int, default=96)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(args.text.read_text()[: 40 << 20]).input_ids)
    rows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    held, rows = rows[:64], rows[64:]
    width, vocab = model.config.hidden_size, model.config.vocab_size
    speculator = Speculator(width, args.inner, vocab)
    optimizer = torch.optim.AdamW(speculator.parameters(), args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began = time.monotonic()
    for step in range(args.steps):
        left = max(0.0, 1 - max(step / args.steps, (time.monotonic() - began) / (60 * args.minutes)))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 20) * min(1.0, 2 * left)
        if not left:
            break
        hidden, given, wanted = states(model, rows[torch.randint(len(rows), (args.rows,))])
        losses = [F.cross_entropy(x, wanted[:, i]) for i, x in enumerate(speculator(hidden, given))]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(speculator.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(step, [round(loss.item(), 3) for loss in losses], flush=True)
    hidden, given, wanted = states(model, held)
    with torch.no_grad():
        right = [
            (x.argmax(-1) == wanted[:, i]).float().mean().item()
            for i, x in enumerate(speculator(hidden, given))
        ]
    print("right on held-out text, by stage:", [round(share, 3) for share in right])
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(speculator.tensors(), args.out / "model.safetensors")
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": vocab,
        "emb_dim": width, "inner_dim": args.inner, "n_predict": STAGES, "tie_weights": True, "scale_input": True,
        "top_k_tokens_per_head": [1] * STAGES, "n_candidates": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (args.out / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
