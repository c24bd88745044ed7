"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer over the token's embedding and three hidden states of the target.

Slot i holds the hidden states of position i and the embedding of token i + 1. Reads the official layout and the
speculators library's, with its additions: norms before `fc`, and EAGLE 3.1's normed output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.devices.graph import Recorder, record
from quire.devices.ops import Attend, Embed, Linear, Receive, SelectRows, StoreKV, Tap, Value
from quire.devices.protocol import Attention, FloatArray, Matrix
from quire.devices.protocol import Norm as NormOperand
from quire.errors import ModelError
from quire.model.families.names import LLAMA_NAMES
from quire.model.loaded import LoadedModel
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Layer
from quire.model.parts.mlp import MLP, MLPConfig
from quire.model.parts.norm import Norm
from quire.model.parts.source import Recording
from quire.model.shard import WHOLE
from quire.spec_decode.head import Head, HeadSource, Named, target_map
from quire.spec_decode.heads.layer import layer_spec, own_layers, published_tokens


def tap_layers(config: dict[str, Any], target: DecoderConfig, path: Any) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads.

    The official ids name layers by what they read, which is the output of the layer before. Ids in `eagle_config` (of
    NVIDIA's heads) name layers by their output.
    """
    count = target.num_layers
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and nested is not None:
        taps = list(nested)
    elif ids is not None:
        taps = [i - 1 for i in ids]
    else:
        taps = [1, count // 2 - 1, count - 4]
    if not taps or not all(type(tap) is int and 0 <= tap < count for tap in taps):
        raise ModelError(
            f"{path}: the hidden states of layers {[tap + 1 for tap in taps]} are asked for, and the target has "
            f"{count} layers: set eagle_aux_hidden_state_layer_ids"
        )
    return tuple(taps)


def read_eagle3(source: HeadSource, target: LoadedModel) -> Head:
    """Read the head. ModelError: it does not fit the target."""
    config = source.config
    spec = layer_spec(config.get("transformer_layer_config", config), source.path)
    vocab, width, h = target.spec.vocab_size, target.spec.hidden_size, spec.hidden_size
    taps = tap_layers(config, target.spec, source.path)
    features = len(taps) * width
    if source.has("lm_head.weight"):
        draft_vocab = source.shape("lm_head.weight")[0]
        head = source.matrix(["lm_head.weight"], [draft_vocab], h, use="head")
    elif target.decoder.head is not None and h == width:
        draft_vocab, head = vocab, target.decoder.head.weight
    else:
        raise ModelError(f"{source.path}: lm_head.weight is missing, and the target's head has another width")
    if source.has("embed_tokens.weight"):
        embedding = source.matrix(["embed_tokens.weight"], [vocab], h, use="table")
    elif h == width:
        embedding = target.decoder.table
    else:
        raise ModelError(f"{source.path}: embed_tokens.weight is missing, and the target's has another width")
    chunk_norms = tuple(
        source.vector(f"fc_norm.{i}.weight", width) for i in range(len(taps)) if config.get("fc_norm")
    )
    eps, attention, mlp = spec.layers[0].norm.eps, spec.layers[0].mixer, spec.layers[0].mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MLPConfig)
    official = any(name.startswith("midlayer.") for name in source.checkpoint.names())
    prefix = "midlayer." if official else "layers.0."
    n, g, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [n * d, g * d, g * d]

    def norm(name: str, size: int = h) -> Norm:
        return source.norm(name, size, eps)

    def head_norm(part: str) -> NormOperand | None:
        return norm(f"{prefix}self_attn.{part}_norm", d).operand if attention.qk_norm is not None else None

    graph = Eagle3(
        attention,
        input_norm=norm("input_norm", features) if config.get("norm_before_fc") else None,
        fc=source.matrix(["fc.weight"], [h], features),
        fc_bias=source.vector("fc.bias", h) if source.has("fc.bias") else None,
        embedding=embedding,
        token_norm=norm(f"{prefix}input_layernorm"),
        hidden_norm=norm(f"{prefix}hidden_norm"),
        qkv=source.halves(qkv, rows, h),
        qk_norms=(head_norm("q"), head_norm("k")),
        out=source.matrix([f"{prefix}self_attn.o_proj.weight"], [h], n * d),
        mlp_norm=norm(f"{prefix}post_attention_layernorm"),
        mlp=MLP(mlp, Named.of(source, spec, LLAMA_NAMES.changed({"layer": prefix})), "layers.0.mlp", WHOLE),
        norm=norm("norm"),
        lm_head=head,
        rest=tuple(own_layers(source, spec, first=1)),
        normed_residual=bool(config.get("norm_before_residual", "speculators_model_type" in config)),
        normed_output=bool(config.get("norm_output", False)),
    )
    ids = target_map(source, draft_vocab, vocab)
    source.refuse_left(("t2d", "d2t", "verifier_", "rotary_emb", "embed_tokens"))

    layers = range(spec.num_layers)
    first, again = (
        record(partial(graph.hidden, feed=feed), graph.logits, draft_vocab, h, layers, (0,), vocab)
        for feed in (True, False)
    )
    return Head(
        first,
        again,
        kv_spec=spec.kv_spec(target.dtype),
        taps=taps,
        tap_norms=chunk_norms,
        tap_eps=eps,
        target_ids=ids,
        num_tokens=published_tokens(config, 3),
        weight_bytes=source.nbytes,
    )


@dataclass(frozen=True, slots=True)
class Eagle3:
    """The graph of a head: h is its width, F the width of the target's features, D its vocabulary.

    fc [h, F]; halves of qkv, the token's and the hidden state's [., h]; lm_head [D, h]; `rest` are the layers after
    the first.
    """

    attention: AttentionConfig
    input_norm: Norm | None
    fc: Matrix
    fc_bias: FloatArray | None
    embedding: Matrix
    token_norm: Norm
    hidden_norm: Norm
    qkv: tuple[Matrix, Matrix]
    qk_norms: tuple[NormOperand | None, NormOperand | None]
    out: Matrix
    mlp_norm: Norm
    mlp: MLP
    norm: Norm
    lm_head: Matrix
    rest: tuple[Layer, ...]
    normed_residual: bool
    normed_output: bool

    def hidden(self, g: Recorder, feed: bool) -> Value:
        """Record the layers. With `feed` they start from the target's features, else from their own output."""
        attention, r = self.attention, Recording(g)
        x = g(Receive(self.fc.shape[1] if feed else attention.hidden_size))
        if feed:
            x = x if self.input_norm is None else self.input_norm(g, x)
            x = g(Linear(x, self.fc, self.fc_bias))
        hidden = self.hidden_norm(g, x)
        token = self.token_norm(g, g(Embed(self.embedding)))
        qkv = g(Linear(hidden, self.qkv[1], residual=g(Linear(token, self.qkv[0]))))
        count, scores = attention.num_heads, Attention(attention.scores.scale, attention.scores.window)
        q = g(StoreKV(qkv, 0, count, r.angles(attention.rope), *self.qk_norms))
        heads = g(Attend(q, 0, count, scores))
        y = g(Linear(heads, self.out, residual=hidden if self.normed_residual else x))
        y = self.mlp.out(g, self.mlp(g, self.mlp_norm(g, y)), y)
        for layer in self.rest:
            y = layer(r, y)
        y = self.norm(g, y) if self.normed_output else y
        g(Tap(y))
        rows = g(SelectRows(y))
        return rows if self.normed_output else self.norm(g, rows)

    def logits(self, g: Recorder, hidden: Value) -> Value:
        return g(Linear(hidden, self.lm_head))
