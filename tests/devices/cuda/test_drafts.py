"""Drafts that a device chains: each pass takes the token of the one before, and the host reads all tokens at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.devices.registry import make_backend
from quire.devices.sampling import NOT_DRAWN, SlotSampling
from quire.runtime.runner import Runner
from quire.spec_decode import draft_pass
from tests.drafter_files import write_drafter, write_eagle3
from tests.models import load_model
from tests.spec_decode.test_token_map import renumbered
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire.devices.cuda.copies import Fetched
from quire.devices.cuda.hidden import CudaRows
from quire.devices.cuda.sampler import Drawn
from quire.devices.torch.run import TorchLogits

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
METHODS = [
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "dflash",
    "draft_model",
    "another vocabulary",
]
PROMPTS = [list(b"Once upon a time"), list(b"A dog"), list(b"Then they all ran away")]


def params(**more: Any) -> list[SamplingParams]:
    """Requests that end at different times, so that their drafts have different lengths."""
    return [
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True, **more),
        SamplingParams(temperature=0.8, seed=2, max_tokens=3, top_k=20, ignore_eos=True),
    ]


class Watched:
    """Notes drafts, and in each the copies to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[Any] = []
        self.reads: list[int] = []  # of each draft of more than one token
        self._count = 0
        for place, name in ((Fetched, "result"), (TorchLogits, "numpy"), (CudaRows, "__array__")):
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, read: Any) -> Any:
        def counted(*given: Any) -> Any:
            self._count += 1
            return read(*given)

        return counted

    def watch(self, llm: LLM) -> None:
        proposer: Any = llm._core._executor.parts[-1]._proposer  # type: ignore[union-attr]
        propose = proposer.propose

        def watched(asks: Any, step: Any) -> Any:
            before, asked = self._count, [(seq.slot, len(seq.tokens), count) for seq, count in asks]
            found = propose(asks, step)
            self.drafts.append((asked, [draft.tokens[:] for draft in found]))
            if max(len(draft.tokens) for draft in found) > 1:
                self.reads.append(self._count - before)
            return found

        proposer.propose = watched
        self.proposer = proposer


def files(method: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the options of a drafter for it."""
    model = write_checkpoint(path, "llama", **SHAPE)
    folder = path / "drafter"
    if method == "draft_model":
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("drafter"))
    elif method == "another vocabulary":
        renumbered(model, folder, 200)
    else:
        folder.mkdir()
        spec = load_model(model, make_backend(threads=1, device="cpu")).spec
        write_eagle3(folder, spec) if method == "eagle3" else write_drafter(folder, method, spec)
    name = "draft_model" if method == "another vocabulary" else method
    return model, {"method": name, "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}


def answers(model: Path, given: list[SamplingParams], watched: Watched | None = None, **options: Any) -> Any:
    blocks = {"max_model_len": 64, "num_gpu_blocks_override": 24, "block_size": 16, "async_scheduling": False}
    with LLM(model=str(model), **{**blocks, **options}) as llm:
        if watched is not None:
            watched.watch(llm)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [[*out.outputs[0].token_ids] for out in llm.generate(prompts, given, use_tqdm=False)]


def passes(proposer: Any) -> list[Any]:
    """The passes of a proposer that give logits."""
    made = getattr(proposer, "_stages", None) or [proposer._first, proposer._again]
    return [each for each in made if each._executable._graph.logits is not None]


@pytest.mark.parametrize("method", METHODS)
def test_chained_drafts_are_the_cpu_s(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = files(method, tmp_path)
    wanted = answers(model, params(), device="cpu")
    chained, here = Watched(monkeypatch), Watched(monkeypatch)
    for watched, device in ((chained, "interpreter"), (here, "cpu")):
        assert answers(model, params(), watched, device=device, speculative_config=config) == wanted
    assert chained.drafts == here.drafts
    assert chained.reads
    assert {*chained.reads} == {1}
    for made in passes(chained.proposer):
        replays = made._executable._graphs._replays
        assert {kind for kind, *_ in replays} == {"body", "head"}


def test_chained_drafts_are_those_that_the_host_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also launch by launch, and beside a request whose penalties need each token on the host."""
    model, config = files("eagle3", tmp_path)
    own: dict[str, Any] = {"device": "interpreter", "speculative_config": config}
    chained, eager, by_host, penalized, edited, edited_by_host = (Watched(monkeypatch) for _ in range(6))
    wanted = answers(model, params(), chained, **own)
    assert answers(model, params(), eager, enforce_eager=True, **own) == wanted
    penalties = params(presence_penalty=0.5, logprobs=1)
    assert answers(model, penalties, penalized, **own) == answers(model, penalties, device="cpu")
    edits = params(min_tokens=4, stop_token_ids=[*range(60, 200)], logit_bias={70: 3.0, 71: -90.0})
    assert answers(model, edits, edited, **own) == answers(model, edits, device="cpu")
    monkeypatch.setattr(draft_pass, "KeepsDraws", Fetched)  # which no sampler is
    assert answers(model, edits, edited_by_host, **own)
    assert answers(model, params(), by_host, **own) == wanted
    assert chained.drafts == eager.drafts == by_host.drafts
    assert max(by_host.reads) > 1
    assert min(penalized.reads) > 1
    assert {*edited.reads} == {1}
    assert edited.drafts == edited_by_host.drafts


def test_the_last_token_of_a_draft_is_known_on_the_device() -> None:
    backend: Any = make_backend(threads=1, device="interpreter")
    sampler, rng = backend.sampler(40), np.random.default_rng(0)
    for slot in range(6):
        sampler.set(slot, SlotSampling(1, SamplingParams(temperature=0.0), [1, 2]))
    for turn in range(8):
        counts = {int(slot): int(rng.integers(1, 5)) for slot in rng.permutation(6)[: turn % 6 + 1]}
        slots = [slot for slot, count in counts.items() for _ in range(count)]
        logits = rng.standard_normal((len(slots), 40)).astype(np.float32)
        guesses = np.where(rng.random(len(slots)) < 0.7, logits.argmax(1), 3)
        drafts = [
            int(guess) if slots[i + 1 : i + 2] == [slots[i]] else NOT_DRAWN for i, guess in enumerate(guesses)
        ]
        places = [
            2 + len(sampler._states[slot].output_tokens) + i for slot in counts for i in range(counts[slot])
        ]
        pending = sampler.sample(TorchLogits(torch.from_numpy(logits)), slots, places, drafts)
        assert isinstance(pending, Drawn)
        kept = {slot: int(backend._last_tokens[slot]) for slot in counts}
        tokens = pending.result().tokens
        assert kept == {slot: token for slot, token in zip(slots, tokens, strict=True) if token != NOT_DRAWN}


def test_a_step_with_drafts_is_launched_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without drafts go on while those with drafts wait for their tokens."""
    model, config = files("eagle3", tmp_path)
    launching, result, launch = list[bool](), Fetched.result, Runner.submit

    def read(self: Fetched) -> Any:
        assert not launching, "a launch waits"
        return result(self)

    def submit(self: Runner, batch: Any) -> Any:
        launching.append(True)
        try:
            return launch(self, batch)
        finally:
            launching.clear()

    given = params()
    given[0].speculative_decoding = False
    given[0].logit_bias, given[0].min_tokens, given[0].stop_token_ids = {70: 3.0}, 3, [*range(60, 200)]
    wanted = answers(model, given, device="cpu")
    monkeypatch.setattr(Fetched, "result", read)
    monkeypatch.setattr(Runner, "submit", submit)
    watched = Watched(monkeypatch)
    own = {"device": "interpreter", "speculative_config": config, "async_scheduling": True}
    assert answers(model, given, watched, **own) == wanted
    assert sum(len(draft) for _, drafts in watched.drafts for draft in drafts) > 0
