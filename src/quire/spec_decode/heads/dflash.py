"""DFlash: drafts of a whole block in one pass. Its layers see the target's features as keys and values of the context.

A block is the newest token and masks; inside it attention goes both ways. Only the context is kept in the cache.
"""

from __future__ import annotations

from msgspec.structs import replace

from quire.devices.graph import Recorder, record
from quire.devices.ops import Embed, Linear, Receive, SelectRows, Value
from quire.errors import ModelError
from quire.model.loaded import LoadedModel
from quire.model.parts.attention import Attention, AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.source import Recording
from quire.spec_decode.head import Head, HeadSource, integer
from quire.spec_decode.heads.layer import layer_spec, own_layers


def read_dflash(source: HeadSource, target: LoadedModel) -> Head:
    """Read the drafter. ModelError: it does not fit the target."""
    config, path = source.config, source.path
    spec, width, vocab = _both_ways(layer_spec(config, path)), target.spec.hidden_size, target.spec.vocab_size
    own = config.get("dflash_config") or {}
    size = integer(config, "block_size", path, 16)
    mask = integer(own, "mask_token_id", path)
    count = target.spec.num_layers
    taps = own.get("target_layer_ids")
    if taps is None:
        span = max(1, spec.num_layers - 1)
        taps = [round(1 + i * (count - 4) / span) for i in range(spec.num_layers)]
    if not taps or not all(type(tap) is int and 0 <= tap < count for tap in taps):
        raise ModelError(f"{path}: target_layer_ids {taps} are not layers of the target, which has {count}")
    if spec.hidden_size != width or mask >= vocab or size < 2:
        raise ModelError(
            f"{path}: a drafter {spec.hidden_size} wide with mask token {mask} and blocks of {size} does not fit its "
            f"target, {width} wide with {vocab} tokens"
        )
    eps, fc = spec.layers[0].norm.eps, source.matrix(["fc.weight"], [width], len(taps) * width)
    hidden_norm, norm = source.norm("hidden_norm", width, eps), source.norm("norm", width, eps)
    stack = own_layers(source, spec)
    source.refuse_left()

    def context(g: Recorder) -> Value:
        """Keys and values of the target's features go into the cache of every layer."""
        r = Recording(g)
        c = hidden_norm(g, g(Linear(g(Receive(fc.shape[1])), fc)))
        for layer in stack:
            assert isinstance(layer.mixer, Attention)
            layer.mixer.store(r, c)
        return c

    def hidden(g: Recorder) -> Value:
        """The block's tokens -> final hidden states of the logit rows."""
        r, x = Recording(g), g(Embed(target.decoder.table))
        for layer in stack:
            x = layer(r, x)
        return norm(g, g(SelectRows(x)))

    layers = range(spec.num_layers)
    return Head(
        first=record(context, None, vocab, width, layers),
        block=record(hidden, target.decoder.logits, vocab, width, layers),
        kv_spec=spec.kv_spec(target.dtype),
        taps=tuple(taps),
        num_tokens=size - 1,
        most=size - 1,
        mask_token=mask,
        weight_bytes=source.nbytes,
    )


def _both_ways(config: DecoderConfig) -> DecoderConfig:
    """The layers with attention to later positions, too."""
    layers = []
    for layer in config.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        scores = replace(layer.mixer.scores, ahead=(layer.mixer.scores.window or config.max_position) - 1)
        layers.append(replace(layer, mixer=replace(layer.mixer, scores=scores)))
    return replace(config, layers=tuple(layers), bidirectional=True)
