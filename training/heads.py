"""The drafters that drafters.py trains, as modules. Each predicts a few tokens ahead and writes a published layout.

B rows, T positions, H the target's width, S the slots that chains start from, V the vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Read:
    """What a frozen target computed: the outputs of some layers and the normed last one [B, T, H], and logits."""

    layers: tuple[Tensor, ...]
    final: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target, its layers and their rotary embedding."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def matrix(rows: int, columns: int) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(made.weight, std=columns**-0.5)
    return made


class Chains(nn.Module):
    """Attention and MLP of a layer that drafts chains: step s of a chain attends to what the target computed up to the
    chain's start, and to the chain's own s earlier steps.
    """

    def __init__(self, sizes: Sizes, reads: int, inner: int) -> None:
        super().__init__()
        n, g, d = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.sizes = sizes
        self.q_proj, self.k_proj = matrix(n * d, reads), matrix(g * d, reads)
        self.v_proj, self.o_proj = matrix(g * d, reads), matrix(sizes.width, n * d)
        self.gate_proj, self.up_proj = matrix(inner, sizes.width), matrix(inner, sizes.width)
        self.down_proj = matrix(sizes.width, inner)
        nn.init.zeros_(self.down_proj.weight)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)

    def heads(self, x: Tensor, projection: nn.Linear, positions: Tensor | None) -> Tensor:
        """[B, S, ...] -> [B, N, S, d], rotated if positions [S] are given, one head per query head."""
        s, y = self.sizes, projection(x)
        y = y.view(*y.shape[:2], -1, s.head_dim).transpose(1, 2)
        if positions is not None:
            half = torch.arange(0, s.head_dim, 2) / s.head_dim
            angles = positions[:, None] * s.theta**-half
            first, second = y.chunk(2, dim=-1)
            cos, sin = angles.cos(), angles.sin()
            y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return y.repeat_interleave(s.heads // y.shape[1], 1)

    def attend(
        self, x: Tensor, base: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], slots: Tensor
    ) -> Tensor:
        """x [B, S, ...] at the step after `own` of the chains that start at `slots`.

        Attends to keys and values `base` up to a chain's start, and to those of its steps from 1 on, `own`.
        """
        positions = slots + len(own)
        q = self.heads(x, self.q_proj, positions) / math.sqrt(self.sizes.head_dim)
        seen = torch.arange(base[0].shape[2]) <= slots[:, None]
        scores = (q @ base[0].transpose(2, 3)).masked_fill(~seen, -math.inf)
        later = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *later], -1).softmax(-1)
        count = base[0].shape[2]
        out = weights[..., :count] @ base[1]
        for place, (_, v) in enumerate(own):
            out = out + weights[..., count + place, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(x, self.k_proj, positions), self.heads(x, self.v_proj, None)

    def mlp(self, x: Tensor) -> Tensor:
        x = self.post_attention_layernorm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ChainHead(nn.Module):
    """A head with one layer: pairs of a state and the next token's embedding go in, states and logits come out."""

    steps = 4
    layer: Chains

    def state(self, read: Read) -> Tensor:
        """What step 0 starts from, for each position: [B, T, H]."""
        raise NotImplementedError

    def join(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of a state and an embedding, and the residual stream."""
        raise NotImplementedError

    def output(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The state that the next step reads, and logits."""
        raise NotImplementedError

    def forward(self, read: Read, rows: Tensor, embedding: Tensor, slots: Tensor) -> list[Tensor]:
        """Logits [B, S, D] of each step, for the chains that start at `slots` [S] of rows [B, T]."""
        count = rows.shape[1] - 1
        state = self.state(read)[:, :count]
        reads, _ = self.join(state, embedding[rows[:, 1:]])
        base = self.layer.keys(reads, torch.arange(count))
        own: list[tuple[Tensor, Tensor]] = []
        state, found = state[:, slots], []
        for step in range(self.steps):
            reads, y = self.join(state, embedding[rows[:, slots + 1 + step]])
            if step:
                own.append(self.layer.keys(reads, slots + step))
            y = y + self.layer.attend(reads, base, own, slots)
            state, logits = self.output(y + self.layer.mlp(y))
            found.append(logits)
        return found


class Eagle3(ChainHead):
    """EAGLE-3 (arXiv:2503.01840) in the speculators library's layout: three layers of the target, a smaller vocabulary.

    `ids` [D] are the target's ids of the head's tokens, ascending.
    """

    def __init__(self, sizes: Sizes, taps: int, ids: Tensor) -> None:
        super().__init__()
        h = sizes.width
        self.sizes, self.ids = sizes, ids
        self.input_norm, self.fc = RMSNorm(taps * h, sizes.eps), matrix(h, taps * h)
        self.input_layernorm, self.hidden_norm = RMSNorm(h, sizes.eps), RMSNorm(h, sizes.eps)
        self.layer = Chains(sizes, 2 * h, 2 * h)
        self.norm, self.lm_head = RMSNorm(h, sizes.eps), matrix(len(ids), h)

    def state(self, read: Read) -> Tensor:
        return self.fc(self.input_norm(torch.cat(read.layers, -1)))

    def join(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.input_layernorm(token), self.hidden_norm(state)), -1), state

    def output(self, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.norm(y)
        return state, self.lm_head(state)

    def tensors(self) -> dict[str, Tensor]:
        found = named(self, "layers.0.", ("input_norm", "fc", "norm", "lm_head"))
        chosen = torch.zeros(self.sizes.vocab, dtype=torch.bool)
        chosen[self.ids] = True
        return found | {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": chosen}

    def config(self, layer: dict[str, Any], taps: list[int], library: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "draft_vocab_size": len(self.ids),
            "norm_before_residual": False, "norm_before_fc": True, "fc_norm": False, "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": taps,
            "transformer_layer_config": {**layer, "intermediate_size": 2 * self.sizes.width},
            "speculators_config": library,
        }  # fmt: skip


class MTP(ChainHead):
    """Multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437), recycled; the target's embedding and head."""

    def __init__(self, sizes: Sizes, head: Tensor) -> None:
        super().__init__()
        h = sizes.width
        self._head = [head]  # the target's, so not a parameter
        self.token_layernorm, self.hidden_layernorm = RMSNorm(h, sizes.eps), RMSNorm(h, sizes.eps)
        self.input_proj, self.input_layernorm = matrix(h, 2 * h), RMSNorm(h, sizes.eps)
        self.layer = Chains(sizes, h, sizes.inner)
        self.final_layernorm = RMSNorm(h, sizes.eps)

    def state(self, read: Read) -> Tensor:
        return read.final

    def join(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        u = self.input_proj(torch.cat((self.token_layernorm(token), self.hidden_layernorm(state)), -1))
        return self.input_layernorm(u), u

    def output(self, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.final_layernorm(y)
        return state, state @ self._head[0].T

    def tensors(self) -> dict[str, Tensor]:
        return named(self, "mtp_layers.0.", ())

    def config(self, layer: dict[str, Any], taps: list[int], library: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["MTPSpeculator"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
            "transformer_layer_config": layer, "speculators_config": library,
        }  # fmt: skip


class MLPSpeculator(nn.Module):
    """IBM's MLP speculator (arXiv:2404.19124). All stages share their weights but the first projection."""

    steps = 3

    def __init__(self, sizes: Sizes, inner: int) -> None:
        super().__init__()
        self.sizes, self.inner = sizes, inner
        self.emb, self.head = nn.Embedding(sizes.vocab, inner), matrix(sizes.vocab, inner)
        self.first, self.later = matrix(inner, sizes.width), matrix(inner, inner)
        self.weight, self.bias = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.zeros(inner))
        state_weight = 0.5 ** (0.5 / self.steps)
        self.token_scale = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        nn.init.normal_(self.emb.weight, std=inner**-0.5)

    def forward(self, read: Read, rows: Tensor, embedding: Tensor, slots: Tensor) -> list[Tensor]:
        state, found = self._normed(read.final[:, slots]) / math.sqrt(2), []  # scale_input
        for step in range(self.steps):
            state = (self.later if step else self.first)(state)
            state = state + self.token_scale * self.emb(rows[:, slots + 1 + step])
            state = F.gelu(self._normed(state) * self.weight + self.bias)
            found.append(self.head(state))
        return found

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def tensors(self) -> dict[str, Tensor]:
        """Tied tensors are stored for the first stage that has them."""
        return {
            "speculator.emb.0.weight": self.emb.weight, "speculator.head.0.weight": self.head.weight,
            "speculator.proj.0.weight": self.first.weight, "speculator.proj.1.weight": self.later.weight,
            "speculator.ln.0.weight": self.weight, "speculator.ln.0.bias": self.bias,
        }  # fmt: skip

    def config(self, layer: dict[str, Any], taps: list[int], library: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
            "vocab_size": self.sizes.vocab, "emb_dim": self.sizes.width, "inner_dim": self.inner,
            "n_predict": self.steps, "tie_weights": True, "scale_input": True,
            "top_k_tokens_per_head": [1] * self.steps, "n_candidates": 1,
        }  # fmt: skip


def named(head: ChainHead, prefix: str, outside: tuple[str, ...]) -> dict[str, Tensor]:
    """Parameters by published name; those of modules `outside` the layer have no prefix."""
    found = {}
    for name, tensor in head.named_parameters():
        first, _, rest = name.partition(".")
        if first == "layer":
            module = rest.split(".")[0]
            group = "mlp." if module in ("gate_proj", "up_proj", "down_proj") else "self_attn."
            name = ("" if module == "post_attention_layernorm" else group) + rest
        found[name if first in outside else prefix + name] = tensor
    return found
