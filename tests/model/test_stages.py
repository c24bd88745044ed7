"""Stages and taps of a graph: runs of layers one after the other equal the whole model; taps are its hidden states."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.devices.protocol import Backend, FloatArray, Graph, KVSpec, Limits, ModelInput, StateInput
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError, ModelError
from quire.model.loaded import LoadedModel
from tests.model.tiny_models import i32, make_model, save_torch
from tests.models import load_model
from tests.tiny import write_checkpoint

# Norms before and after, over the sum; parallel; windows; latent; experts; ALiBi; positions and a projection; streams.
FAMILIES = ("llama", "gemma3", "olmo2", "falcon", "gpt_oss", "deepseek_v3", "bloom", "opt", "gemma3n_text")
BLOCK_SIZE, NUM_BLOCKS = 4, 24
LIMITS = Limits(max_tokens=32, max_seqs=2, max_logit_rows=3)


class Rank:
    """A graph with a KV cache of its own layers."""

    def __init__(self, model: LoadedModel, backend: Backend, graph: Graph) -> None:
        spec = msgspec.structs.replace(model.spec.kv_spec("float32"), num_layers=len(graph.layers))
        self.graph = graph
        self.executable = backend.compile(graph, backend.kv_cache(spec, NUM_BLOCKS, BLOCK_SIZE), LIMITS)


def steps() -> list[ModelInput]:
    """Two prompts, one in two chunks; then both decode. Rows of logits: some, more than fit at a time, all."""
    rng = np.random.default_rng(5)
    table = rng.permutation(NUM_BLOCKS).astype(np.int32).reshape(2, -1)
    made = []
    for lengths, rows in (
        ([(9, 9), (4, 4)], [8, 0, 3, 12, 5]),
        ([(6, 15), (1, 5)], []),
        ([(1, 16), (1, 6)], [0, 1]),
    ):
        cu = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
        positions = np.concatenate([np.arange(end - n, end) for n, end in lengths]).astype(np.int32)
        ends = i32(*(end for _, end in lengths))
        tokens = rng.integers(0, 256, cu[-1]).astype(np.int32)
        made.append(ModelInput(tokens, positions, cu, ends, i32(0, 1), table, i32(*rows)))
    return made


def with_states(step: ModelInput, spec: KVSpec) -> ModelInput:
    """The step with rows of states, one by slot, if the model has any."""
    if not spec.bytes_per_state(0):
        return step
    none, counts = np.zeros(len(step.slots_B), np.int32), np.diff(step.cu_q_B1).astype(np.int32)
    states = StateInput(step.slots_B, none, counts, np.zeros((0, 3), np.int32))
    return msgspec.structs.replace(step, states=states)


def logits(rank: Rank, inputs: ModelInput) -> FloatArray:
    """All rows of logits, in pieces, and the final hidden states."""
    count, most = len(inputs.logit_rows_L), LIMITS.max_logit_rows
    pieces = [rank.executable.run(inputs).numpy().copy()]
    pieces += [
        rank.executable.logits(start, min(start + most, count)).numpy().copy()
        for start in range(most, count, most)
    ]
    return np.concatenate(pieces)


def copied(rank: Rank) -> list[FloatArray]:
    return [tap.copy() for tap in rank.executable.taps()]


@pytest.fixture(params=FAMILIES, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stages") / "model", request.param)


def test_stages_one_after_the_other_equal_the_whole(directory: Path, backend: Backend) -> None:
    model = load_model(directory, backend)
    whole, tapped = Rank(model, backend, model.graph), Rank(model, backend, model.stage(taps=(2, 0, 0)))
    assert tapped.graph.taps == (0, 2)
    for cuts in ([0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
        ranks = [
            Rank(model, backend, model.stage(range(a, b), taps=(0, 2))) for a, b in itertools.pairwise(cuts)
        ]
        for inputs in steps():
            wanted, wanted_hidden = logits(whole, inputs), whole.executable.hidden().copy()
            assert logits(tapped, inputs).tobytes() == wanted.tobytes(), "taps changed the logits"
            assert tapped.executable.hidden().tobytes() == wanted_hidden.tobytes()
            between, taps = inputs, []
            for rank in ranks[:-1]:
                nothing = msgspec.structs.replace(between, logit_rows_L=i32())
                assert len(rank.executable.run(nothing)) == 0
                taps += copied(rank)
                output = rank.executable.hidden().copy()
                assert output.shape == (len(inputs.tokens_T), model.spec.stream_width)
                between = msgspec.structs.replace(inputs, hidden_TD=output)
            assert logits(ranks[-1], between).tobytes() == wanted.tobytes()
            assert ranks[-1].executable.hidden().tobytes() == wanted_hidden.tobytes()
            taps += copied(ranks[-1])
            assert [tap.tobytes() for tap in taps] == [tap.tobytes() for tap in copied(tapped)]


def test_taps_are_what_the_reference_computes(directory: Path, backend: Backend) -> None:
    reference = ReferenceBackend()
    ranks = []
    for each in (backend, reference):
        model = load_model(directory, each)
        ranks.append(Rank(model, each, model.stage(taps=range(3))))
    for inputs in steps():
        found, wanted = ([rank.executable.run(inputs), copied(rank)][1] for rank in ranks)
        assert len(found) == len(wanted) == 3
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.shape == (len(inputs.tokens_T), model.spec.hidden_size)
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_taps_are_transformers_hidden_states(variant: str, backend: Backend, tmp_path: Path) -> None:
    torch_model: Any = make_model(variant)
    save_torch(torch_model, tmp_path)
    model = load_model(tmp_path, backend)
    count = model.spec.num_layers
    rank = Rank(model, backend, model.stage(taps=range(count)))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    table = np.arange(NUM_BLOCKS, dtype=np.int32).reshape(2, -1)
    length = len(tokens)
    positions = np.arange(length, dtype=np.int32)
    rank.executable.run(
        ModelInput(i32(*tokens), positions, i32(0, length), i32(length), i32(0), table, i32())
    )
    with torch.no_grad():
        hidden = torch_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # The last of transformers' hidden states is normed; the one after the embedding is not a layer's.
    for mine, theirs in zip(rank.executable.taps()[:-1], hidden[1:-1], strict=True):
        np.testing.assert_allclose(mine, theirs[0].numpy(), rtol=2e-4, atol=2e-4)


def test_what_is_not_a_stage_is_refused(backend: Backend, tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path / "model"), backend)
    for layers in (range(0), range(2, 2), range(4), range(0, 3, 2), range(-1, 2)):
        with pytest.raises(ModelError, match="must be a run of the model's 3 layers"):
            model.stage(layers)
    with pytest.raises(ModelError, match="only layers 0 to 2 can be tapped"):
        model.stage(taps=[3])
    first = Rank(model, backend, model.stage(range(2)))
    last = Rank(model, backend, model.stage(range(2, 3)))
    inputs = steps()[2]
    with pytest.raises(EngineError, match="has no head"):
        first.executable.run(inputs)
    wrong = np.zeros((2, model.spec.hidden_size + 1), np.float32)
    for hidden in (None, wrong, wrong[:1, :-1].copy()):
        with pytest.raises(EngineError, match="hidden state"):
            last.executable.run(msgspec.structs.replace(inputs, hidden_TD=hidden))
