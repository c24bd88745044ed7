"""Heads without attention: Medusa (Cai et al. 2024, arXiv:2401.10774) and IBM's MLP speculator (arXiv:2404.19124).

Each reads the target's last hidden state alone and has a graph per token that it drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Add, Apply, Embed, Linear, Normalize, Receive, SelectRows, Tap, Value
from quire.devices.protocol import GELU, FloatArray, Matrix
from quire.devices.protocol import Norm as NormOperand
from quire.errors import ModelError
from quire.model.loaded import LoadedModel
from quire.model.parts.norm import Norm
from quire.spec_decode.head import Head, HeadSource, integer

Block = tuple[Matrix, FloatArray]


def read_medusa(source: HeadSource, target: LoadedModel) -> Head:
    """Read the heads; the tensors tell their number, whatever the config says. ModelError if they misfit the target."""
    width, vocab = target.spec.hidden_size, target.spec.vocab_size
    base = "medusa_head." if source.has("medusa_head.0.0.linear.weight") else ""
    stages: list[Graph] = []
    while source.has(f"{base}{len(stages)}.0.linear.weight"):
        prefix = f"{base}{len(stages)}."
        blocks: list[Block] = []
        while source.has(f"{prefix}{len(blocks)}.linear.weight"):
            name = f"{prefix}{len(blocks)}.linear"
            weight = source.matrix([f"{name}.weight"], [width], width)
            blocks.append((weight, source.vector(f"{name}.bias", width)))
        head = source.matrix([f"{prefix}{len(blocks)}.weight"], [vocab], width, use="head")
        hidden = partial(medusa_hidden, norm=target.decoder.norm, width=width, blocks=tuple(blocks))
        stages.append(record(hidden, partial(linear, weight=head), vocab, width))
    if not stages:
        raise ModelError(f"{source.path}: there are no Medusa heads (0.0.linear.weight)")
    source.refuse_left()
    return _head(stages, source, target)


def medusa_hidden(g: Recorder, width: int, norm: Norm | None, blocks: Sequence[Block]) -> Value:
    x = g(Receive(width))
    x = x if norm is None else norm(g, x)
    for weight, bias in blocks:
        x = g(Linear(x, weight, bias, "silu", residual=x))
    return g(SelectRows(x))


def linear(g: Recorder, x: Value, weight: Matrix) -> Value:
    return g(Linear(x, weight))


def read_mlp_speculator(source: HeadSource, target: LoadedModel) -> Head:
    """Read the speculator. ModelError: it does not fit the target."""
    config, path, vocab, width = source.config, source.path, target.spec.vocab_size, target.spec.hidden_size
    count = integer(config, "n_predict", path)
    emb = integer(config, "emb_dim", path)
    inner = integer(config, "inner_dim", path, 0) or emb
    if (emb, config.get("vocab_size")) != (width, vocab) or not count:
        raise ModelError(
            f"{path}: made for a target {emb} wide with {config.get('vocab_size')} tokens, and drafts {count}; this "
            f"target is {width} wide with {vocab} tokens: use a speculator that was made for it"
        )
    state_weight = 0.5 ** (0.5 / count)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    tied, scaled = bool(config.get("tie_weights")), bool(config.get("scale_input"))
    made: dict[str, Matrix] = {}

    def matrix(kind: str, stage: int, rows: int, columns: int) -> Matrix:
        """Tied stages have one matrix, which is stored for each of them or for the first."""
        name = f"speculator.{kind}.{stage}.weight"
        first = int(kind == "proj" and stage > 0) if tied else stage
        shared = f"speculator.{kind}.{first}.weight"
        if not tied or source.has(name):
            source.part(name, (rows, columns))
        if shared not in made:
            use = {"emb": "table", "head": "head"}.get(kind, "linear")
            made[shared] = source.matrix([shared], [rows], columns, use=use)
        return made[shared]

    norms = [] if target.decoder.norm is None else [target.decoder.norm.operand]
    if scaled:
        norms.append(NormOperand("rms", np.full(width, 1 / math.sqrt(2), np.float32), None, 1e-6))
    stages = []
    for i in range(count):
        columns = inner if i else width
        hidden = partial(
            mlp_hidden,
            width=columns,
            norms=() if i else tuple(norms),
            projection=matrix("proj", i, inner, columns),
            embedding=matrix("emb", i, vocab, inner),
            scale=emb_weight / state_weight,
            norm=source.norm(f"speculator.ln.{0 if tied else i}", inner, 1e-6, bias=True),
        )
        head = partial(linear, weight=matrix("head", i, vocab, inner))
        stages.append(record(hidden, head, vocab, inner, range(1), (0,)))
    source.refuse_left(("speculator.ln.",) if tied else ())
    return _head(stages, source, target)


def mlp_hidden(
    g: Recorder,
    width: int,
    norms: tuple[NormOperand, ...],
    projection: Matrix,
    embedding: Matrix,
    scale: float,
    norm: Norm,
) -> Value:
    state = g(Receive(width))
    for each in norms:
        state = g(Normalize(state, each))
    state = g(Add(g(Linear(state, projection)), g(Embed(embedding)), scale))
    state = g(Apply(norm(g, state), GELU()))
    g(Tap(state))
    return g(SelectRows(state))


def _head(stages: Sequence[Graph], source: HeadSource, target: LoadedModel) -> Head:
    count, taps = len(stages), (target.spec.num_layers - 1,)
    return Head(stages=tuple(stages), taps=taps, num_tokens=count, most=count, weight_bytes=source.nbytes)
