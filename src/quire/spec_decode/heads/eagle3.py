"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): a layer over the token's embedding and three hidden states of the target.

Slot i holds the hidden states of position i and the embedding of token i + 1. Reads the official layout and the
speculators library's, with its additions: norms before `fc`, and EAGLE 3.1's normed output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Attend, Embed, Linear, Receive, SelectRows, StoreKV, Tap, Value
from quire.devices.protocol import Attention, FloatArray, Matrix
from quire.devices.protocol import Norm as NormOperand
from quire.errors import ModelError
from quire.model.expand import decoder_config
from quire.model.families.names import TensorNames
from quire.model.loaded import LoadedModel
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Layer
from quire.model.parts.mlp import MLP
from quire.model.parts.norm import Norm
from quire.model.parts.recording import Recording
from quire.model.shard import WHOLE
from quire.model.spec import ArchSpec
from quire.spec_decode.head import Head, HeadSource, Named, target_map
from quire.spec_decode.heads.layer import layer_spec, own_layers, published_tokens
from quire.weights.parts import Take


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
    is_library = "speculators_model_type" in config
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
    eps = spec.norm_eps
    prefix = "midlayer." if source.has("midlayer.self_attn.q_proj.weight") else "layers.0."
    n, g, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [n * d, g * d, g * d]

    def columns(start: int) -> Take:
        return lambda array: array[:, start : start + h]

    normed, own = spec.norms_qk(0), decoder_config(spec)
    mlp = own.layers[0].mlp
    assert mlp is not None
    first = Named.of(source, own, TensorNames(layer=prefix))
    weights = Eagle3Weights(
        input_norm=source.norm("input_norm", features, eps) if config.get("norm_before_fc") else None,
        fc=source.matrix(["fc.weight"], [h], features),
        fc_bias=source.vector("fc.bias", h) if source.has("fc.bias") else None,
        embedding=embedding,
        token_norm=source.norm(f"{prefix}input_layernorm", h, eps),
        hidden_norm=source.norm(f"{prefix}hidden_norm", h, eps),
        qkv_token=source.matrix(qkv, rows, 2 * h, columns(0)),
        qkv_hidden=source.matrix(qkv, rows, 2 * h, columns(h)),
        q_norm=source.norm(f"{prefix}self_attn.q_norm", d, eps).operand if normed else None,
        k_norm=source.norm(f"{prefix}self_attn.k_norm", d, eps).operand if normed else None,
        out=source.matrix([f"{prefix}self_attn.o_proj.weight"], [h], n * d),
        mlp_norm=source.norm(f"{prefix}post_attention_layernorm", h, eps),
        mlp=MLP(mlp, first, "layers.0.mlp", WHOLE),
        norm=source.norm("norm", h, eps),
        head=head,
        rest=tuple(own_layers(source, own, first=1)),
    )
    residual = config.get("norm_before_residual", is_library)
    graph = Eagle3(spec, weights, bool(residual), bool(config.get("norm_output", False)))
    ids = target_map(source, draft_vocab, vocab)
    source.refuse_left(("t2d", "d2t", "verifier_", "rotary_emb", "embed_tokens"))

    def made(feed: bool) -> Graph:
        hidden = partial(graph.hidden, feed=feed)
        return record(hidden, graph.head, draft_vocab, h, range(spec.num_layers), (0,), vocab)

    return Head(
        first=made(True),
        again=made(False),
        kv_spec=own.kv_spec(target.dtype),
        taps=taps,
        tap_norms=chunk_norms,
        tap_eps=eps,
        target_ids=ids,
        num_tokens=published_tokens(config, 3),
        weight_bytes=source.nbytes,
    )


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """The tensors of a head: h its width, F the width of the target's features, D its vocabulary.

    fc [h, F]; qkv of the token's and of the hidden half [., h]; head [D, h]; `rest` are the layers after the first.
    """

    input_norm: Norm | None
    fc: Matrix
    fc_bias: FloatArray | None
    embedding: Matrix
    token_norm: Norm
    hidden_norm: Norm
    qkv_token: Matrix
    qkv_hidden: Matrix
    q_norm: NormOperand | None
    k_norm: NormOperand | None
    out: Matrix
    mlp_norm: Norm
    mlp: MLP
    norm: Norm
    head: Matrix
    rest: tuple[Layer, ...]


class Eagle3:
    """The graph of a head. With `feed` it starts from the target's features, else from its own output."""

    def __init__(
        self, spec: ArchSpec, weights: Eagle3Weights, normed_residual: bool, normed_output: bool
    ) -> None:
        self.spec, self.weights = spec, weights
        self._normed_residual, self._normed_output = normed_residual, normed_output

    def hidden(self, g: Recorder, feed: bool) -> Value:
        spec, w, r = self.spec, self.weights, Recording(g)
        x = g(Receive(w.fc.shape[1] if feed else spec.hidden_size))
        if feed:
            x = x if w.input_norm is None else w.input_norm(g, x)
            x = g(Linear(x, w.fc, w.fc_bias))
        hidden = w.hidden_norm(g, x)
        token = w.token_norm(g, g(Embed(w.embedding)))
        qkv = g(Linear(hidden, w.qkv_hidden, residual=g(Linear(token, w.qkv_token))))
        q = g(StoreKV(qkv, 0, spec.num_heads, r.angles(spec.rope), w.q_norm, w.k_norm))
        heads = g(Attend(q, 0, spec.num_heads, Attention(spec.attention_scale, spec.windows[0])))
        y = g(Linear(heads, w.out, residual=hidden if self._normed_residual else x))
        y = w.mlp.out(g, w.mlp(g, w.mlp_norm(g, y)), y)
        for layer in w.rest:
            y = layer(r, y)
        if self._normed_output:
            y = w.norm(g, y)
            g(Tap(y))
            return g(SelectRows(y))
        g(Tap(y))
        return w.norm(g, g(SelectRows(y)))

    def head(self, g: Recorder, hidden: Value) -> Value:
        return g(Linear(hidden, self.weights.head))
