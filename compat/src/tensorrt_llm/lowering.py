"""Read a recorded network as a description and a checkpoint, which are packed, divided and built like any other.

The network must be one that the decoder computes: an embedding, layers that each add attention and an MLP to the
residual stream, a final norm, a head. Knows layers and configs of parts; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.build import Source
from quire.config import EngineConfig
from quire.engine.source import asked_quantization
from quire.errors import ConfigError
from quire.model.checkpoint import OpenedFiles, OpenModel, model_info
from quire.model.families.config import ConfigReader
from quire.model.families.names import LLAMA_NAMES
from quire.model.families.rope import parse_rope
from quire.model.packing import check_tensors, choose_dtype, own_quantization
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Placement
from quire.model.parts.rope import RopeSpec
from quire.model.tree import make_decoder
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.hub import find_model
from quire.weights.schemes import Quantization
from quire.weights.tensor import Array
from tensorrt_llm.functional import PositionEmbeddingType
from tensorrt_llm.layers import MLP, Attention, Embedding, GatedMLP, Linear, Norm, RmsNorm
from tensorrt_llm.network import Network, Tensor
from tensorrt_llm.parameter import Parameter

T = TypeVar("T")
WHERE = "the network"
NAMES = LLAMA_NAMES.changed({"attention_post_norm": "attention_post_norm", "mlp_post_norm": "mlp_post_norm"})
SHAPES = (
    "it must be an embedding of the token ids; layers that add attention and an MLP to their input, with norms before "
    "or after them; a norm; and a linear layer without anything after it"
)


def source_of(network: Network, config: EngineConfig) -> Source:
    """Make a network the source of a build, with the tokenizer of the model that `config` names for it."""
    model = config.model
    opened = open_network(network, model.dtype, asked_quantization(model, None))
    beside = find_model(model.tokenizer, weights=False) if model.tokenizer else None
    return Source(OpenedFiles(opened), beside)


def open_network(network: Network, dtype: str, quantized: Quantization | None) -> OpenModel:
    """Open the network as a checkpoint. ConfigError if it is empty, not a decoder, or lacks a weight."""
    if network.output is None:
        what = "is empty" if network.empty else "has no result"
        raise ConfigError(
            f"{WHERE} {what}: call layers inside `with net_guard(network):` and mark the logits, or fill it from a "
            "model by to_trt(network)"
        )
    read = _read(network.output)
    spec = _spec(network, read)
    spec.check(WHERE)
    names = NAMES.changed(
        {"interleaved": read.blocks[0].attention.positions is PositionEmbeddingType.rope_gptj}
    )
    checkpoint = NetworkWeights(_tensors(read, spec))
    wanted = check_tensors(spec, names, checkpoint, Path(WHERE))
    kept = choose_dtype(dtype, wanted, checkpoint)
    quantized = own_quantization(dtype, wanted, checkpoint, quantized)
    info = model_info(Path(WHERE), spec, wanted, kept, quantized, tuple(network.eos_token_ids), {})
    return OpenModel(info, spec, checkpoint, names)


class NetworkWeights(Unquantized):
    """Weights of a network as a `Checkpoint`."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._tensors[name].dtype

    def path(self, name: str) -> Path:
        return Path(WHERE)

    def get(self, name: str) -> Array:
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Branch of a residual sum: attention or an MLP, with its norms. It reads `normed`, the norm of `source`."""

    layer: Attention | MLP
    before: Norm | None
    after: Norm | None
    normed: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Block: one layer of the decoder, with the norms around its attention and its MLP."""

    attention: Attention
    mlp: MLP
    placement: Placement
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class _Decoder:
    embedding: Embedding
    blocks: list[_Block]
    norm: Norm | None
    head: Linear


def _read(output: Tensor) -> _Decoder:
    head = output.made_by
    if not isinstance(head, Linear):
        raise ConfigError(f"{WHERE} does not end in a linear layer, which makes the logits: {SHAPES}")
    x, norm = output.inputs[0], None
    if isinstance(x.made_by, Norm) and not _is_sum_norm(x):
        norm, x = x.made_by, x.inputs[0]
    blocks: list[_Block] = []
    while x.inputs and not isinstance(x.made_by, Embedding):
        block, x = _read_block(x, len(blocks))
        blocks.append(block)
    if not isinstance(x.made_by, Embedding) or x.inputs[0].inputs or x.inputs[0].made_by is not None:
        raise ConfigError(f"{WHERE} does not begin with an embedding of its input: {SHAPES}")
    if not blocks:
        raise ConfigError(f"{WHERE} has no layers between its embedding and its head: {SHAPES}")
    return _Decoder(x.made_by, blocks[::-1], norm, head)


def _is_sum_norm(x: Tensor) -> bool:
    """Tell whether a norm belongs to the sum before it: the sum's branch then has no norm of its own."""
    total = x.inputs[0]
    return _is_sum(total) and any(
        isinstance(other.made_by, (Attention, MLP)) and other.inputs[0] is stream
        for stream, other in (total.inputs, total.inputs[::-1])
    )


def _is_sum(x: Tensor) -> bool:
    return x.made_by is None and len(x.inputs) == 2


def _branch(x: Tensor) -> _Branch | None:
    after = None
    if isinstance(x.made_by, Norm):
        after, x = x.made_by, x.inputs[0]
    layer = x.made_by
    if not isinstance(layer, (Attention, MLP)):
        return None
    normed = x.inputs[0]
    if isinstance(normed.made_by, Norm) and not _is_sum_norm(normed):
        return _Branch(layer, normed.made_by, after, normed, normed.inputs[0])
    return _Branch(layer, None, after, normed, normed)


def _residual(x: Tensor) -> tuple[_Branch, Tensor] | None:
    """Find the branch of a sum, and the value that it is added to."""
    if not _is_sum(x):
        return None
    for stream, other in (x.inputs, x.inputs[::-1]):
        branch = _branch(other)
        if branch is not None and (branch.source is stream or _adds_to(stream, branch.source)):
            return branch, stream
    return None


def _adds_to(x: Tensor, source: Tensor) -> bool:
    """Tell whether `x` is `source` plus a branch of it."""
    if not _is_sum(x):
        return False
    branches = [(_branch(b), a) for a, b in (x.inputs, x.inputs[::-1])]
    return any(found is not None and found.source is source is stream for found, stream in branches)


def _read_block(x: Tensor, place: int) -> tuple[_Block, Tensor]:
    """Read the layer that makes `x`, and its input. `place` counts from the end."""
    second, x, late = _half(x, place)
    first, start, early = _half(x, place)
    parallel = second.source is first.source
    attention = next((half for half in (first, second) if isinstance(half.layer, Attention)), None)
    mlp = next((half for half in (first, second) if isinstance(half.layer, MLP)), None)
    if attention is None or mlp is None or (mlp is first and not parallel):
        raise ConfigError(f"layer {place + 1} from the end is not attention followed by an MLP: {SHAPES}")
    assert isinstance(attention.layer, Attention)
    assert isinstance(mlp.layer, MLP)
    norms = attention.before, attention.after or early, mlp.before, mlp.after or late
    placement = _placement(parallel, attention, mlp, early, late)
    if placement is None:
        raise ConfigError(
            f"layer {place + 1} from the end has norms at places that do not go together: give attention and MLP a "
            "norm before, after, or both; or norm both sums"
        )
    shared = placement == "parallel"
    return (
        _Block(
            attention.layer, mlp.layer, placement, norms[0], norms[1], None if shared else norms[2], norms[3]
        ),
        start,
    )


def _half(x: Tensor, place: int) -> tuple[_Branch, Tensor, Norm | None]:
    """Find the last branch that was added to make `x`, the value before it, and the norm of the sum."""
    norm = None
    if isinstance(x.made_by, Norm):
        norm, x = x.made_by, x.inputs[0]
    found = _residual(x)
    if found is None:
        raise ConfigError(
            f"layer {place + 1} from the end does not add attention or an MLP to its own input: {SHAPES}"
        )
    return *found, norm


def _placement(
    parallel: bool, attention: _Branch, mlp: _Branch, early: Norm | None, late: Norm | None
) -> Placement | None:
    norms = [
        norm is not None for norm in (attention.before, attention.after, mlp.before, mlp.after, early, late)
    ]
    if parallel:
        if norms != [True, False, True, False, False, False]:
            return None
        return "parallel" if attention.normed is mlp.normed else "parallel_two"
    kinds: dict[tuple[bool, ...], Placement] = {
        (True, False, True, False, False, False): "pre",
        (False, True, False, True, False, False): "post",
        (True, True, True, True, False, False): "sandwich",
        (False, False, False, False, True, True): "sum",
    }
    return kinds.get(tuple(norms))


def _one(what: str, values: Iterable[T]) -> T:
    """Return the value that all layers share. ConfigError if they differ."""
    kinds: list[T] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    if len(kinds) > 1:
        raise ConfigError(f"{WHERE}: layers differ in {what}: {kinds[0]} and {kinds[1]}; make them equal")
    return kinds[0]


def _spec(network: Network, read: _Decoder) -> DecoderConfig:
    blocks, (vocab, hidden) = read.blocks, read.embedding.weight.shape
    attentions, mlps = [block.attention for block in blocks], [block.mlp for block in blocks]
    norms = [norm for block in blocks for norm in _norms(block)] + [
        norm for norm in [read.norm] if norm is not None
    ]
    if not norms:
        raise ConfigError(f"{WHERE} has no norm: {SHAPES}")
    positions = _one("their positions", (a.positions for a in attentions))
    longest = _one("max_position_embeddings", (a.max_positions for a in attentions))
    scale = _one("the scale of scores", (a.head_size**-0.5 / a.q_scaling for a in attentions))
    fields: dict[str, Any] = {}
    if positions is PositionEmbeddingType.alibi:
        fields["scores_alibi"] = 1.0
    if _one("qk_layernorm", (a.q_layernorm is not None for a in attentions)):
        fields["qk_norm"] = "head"
        fields["qk_norm_eps"] = _one("eps of qk_layernorm", (a.q_layernorm.eps for a in attentions))  # type: ignore[union-attr]
    return make_decoder(
        network.architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=len(blocks),
        max_position=longest,
        activation=_one("their activation", (mlp.activation for mlp in mlps)),
        final_norm=read.norm is not None,
        norm_kind=_one(
            "the kind of their norms", ("rms" if isinstance(n, RmsNorm) else "layer" for n in norms)
        ),
        norm_eps=_one("eps", (norm.eps for norm in norms)),
        norm_bias=_one("the bias of their norms", (norm.bias is not None for norm in norms)),
        placement=_one("the place of their norms", (block.placement for block in blocks)),
        attention_num_heads=[a.num_heads for a in attentions],
        attention_num_kv_heads=[a.num_kv_heads for a in attentions],
        attention_head_dim=[a.head_size for a in attentions],
        attention_rope=[_rope(a, longest) for a in attentions],
        attention_qkv_bias=_one("the bias of qkv", (a.qkv.bias is not None for a in attentions)),
        attention_out_bias=_one("the bias of dense", (a.dense.bias is not None for a in attentions)),
        scores_scale=scale,
        scores_window=[a.window for a in attentions],
        mlp_intermediate_size=[mlp.fc.weight.shape[0] for mlp in mlps],
        mlp_gated=_one("the kind of their MLPs", (isinstance(mlp, GatedMLP) for mlp in mlps)),
        mlp_bias=_one("the bias of their MLPs", (m.fc.bias is not None for m in mlps)),
        head_tied=read.head.weight is read.embedding.weight,
        head_bias=read.head.bias is not None,
        **fields,
    )


def _norms(block: _Block) -> list[Norm]:
    found = block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm
    return [norm for norm in found if norm is not None]


def _rope(attention: Attention, longest: int) -> RopeSpec | None:
    if attention.positions in (PositionEmbeddingType.alibi, PositionEmbeddingType.none):
        return None
    rotated = int(attention.head_size * attention.rotated)
    config = ConfigReader({"rope_theta": attention.theta}, WHERE)
    return parse_rope(config, ConfigReader(attention.rope_scaling, WHERE), rotated, longest)


def _tensors(read: _Decoder, spec: DecoderConfig) -> dict[str, Array]:
    """Name the weights as a Llama checkpoint does."""
    found: dict[str, Array] = {}

    def take(module: str, layer: Linear | Norm | Embedding | None, where: str) -> None:
        for kind in ("weight", "bias"):
            parameter = getattr(layer, kind, None)
            if parameter is not None:
                found[f"{module}.{kind}"] = _value(parameter, f"{where}.{kind}")

    take(NAMES["embedding"], read.embedding, "the embedding")
    take(NAMES["norm"], read.norm, "the final norm")
    if not spec.tied:
        take(NAMES["head"], read.head, "the head")
    elif read.head.bias is not None:
        found[f"{NAMES['head']}.bias"] = _value(read.head.bias, "the head's bias")
    for i, block in enumerate(read.blocks):
        prefix, where = NAMES.layer.format(i=i), f"layer {i}: "
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            take(prefix + NAMES[name], getattr(block, name), where + name)
        attention, mlp = block.attention, block.mlp
        for name, norm in (
            (NAMES["attention.q_norm"], attention.q_layernorm),
            (NAMES["attention.k_norm"], attention.k_layernorm),
        ):
            take(prefix + name, norm, where + "qk_layernorm")
        take(prefix + NAMES["attention.out"], attention.dense, where + "dense")
        take(prefix + NAMES["mlp.down"], mlp.proj, where + "proj")
        if isinstance(mlp, GatedMLP):
            take(prefix + NAMES["mlp.gate"], mlp.fc, where + "fc")
            take(prefix + NAMES["mlp.up"], mlp.gate, where + "gate")
        else:
            take(prefix + NAMES["mlp.up"], mlp.fc, where + "fc")
        _split_qkv(found, prefix, attention, where)
    return found


def _split_qkv(found: dict[str, Array], prefix: str, attention: Attention, where: str) -> None:
    """Add the parts of the fused projection."""
    q, kv = attention.num_heads * attention.head_size, attention.num_kv_heads * attention.head_size
    bounds = {
        NAMES["attention.q"]: (0, q),
        NAMES["attention.k"]: (q, q + kv),
        NAMES["attention.v"]: (q + kv, q + 2 * kv),
    }
    for kind in ("weight", "bias"):
        parameter = getattr(attention.qkv, kind)
        if parameter is None:
            continue
        value = _value(parameter, f"{where}qkv.{kind}")
        for module, (start, stop) in bounds.items():
            found[f"{prefix}{module}.{kind}"] = value[start:stop]


def _value(parameter: Parameter, where: str) -> Array:
    if parameter.value is None:
        raise ConfigError(f"{where} has no value: set `.value` to an array of shape {list(parameter.shape)}")
    return parameter.value
