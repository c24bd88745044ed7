"""Tensor parallelism through the real processes: the same tokens as one rank, exact batches, and typed ends."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from msgspec.structs import astuple

from quire import LLM, LoRARequest, SamplingParams
from quire.devices.protocol import ModelInput, StateInput
from quire.errors import ConfigError, EngineError, ModelError, QuireError
from quire.ranks.commands import RunStep, decode_command, encode, packed_step, unpacked_step
from quire.ranks.executable import EarlierStages, RankedKVCache
from quire.ranks.worker import Worker
from tests.adapter_files import write_adapter
from tests.model.test_stages import steps
from tests.serve.running import start
from tests.tiny import write_checkpoint
from tests.waiting import stopped, wait_until

PROMPTS = [{"prompt_token_ids": [5 + i, 9, 40, 7, 100 + i][: 2 + i % 4]} for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True, seed=3, logprobs=2)


def rank_processes() -> set[psutil.Process]:
    """The processes of all ranks that this test process has started, by itself or through servers."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "quire.ranks.worker" in " ".join(process.cmdline()):
                found.add(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def answers(llm: LLM, prompts: Any, params: SamplingParams) -> list[Any]:
    """Tokens and log-probabilities of each answer."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (one.token_ids, [sorted((t, p.logprob) for t, p in step.items()) for step in one.logprobs or ()])
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def ranked(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tensor_parallel_size=2, block_size=4, max_num_batched_tokens=16) as llm:
        yield llm


def test_two_ranks_draw_the_tokens_of_one(model: Path, ranked: LLM) -> None:
    with LLM(str(model), block_size=4) as whole:
        for params in (GREEDY, DRAWN):
            wanted, found = answers(whole, PROMPTS, params), answers(ranked, PROMPTS, params)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
            for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert [p for _, p in a] == pytest.approx([p for _, p in b], abs=1e-4)


def test_batches_chunks_and_cached_prefixes_change_no_bit(model: Path, ranked: LLM) -> None:
    long = [{"prompt_token_ids": [(7 * i + k) % 300 for k in range(37)]} for i in (1, 1, 2)]
    for params in (GREEDY, DRAWN):
        batched = answers(ranked, PROMPTS + long, params)
        assert answers(ranked, PROMPTS + long, params) == batched  # from cached prefixes
        with LLM(str(model), tensor_parallel_size=2, enable_prefix_caching=False) as alone:
            assert [answers(alone, [prompt], params)[0] for prompt in PROMPTS + long] == batched


def test_samples_grammars_and_drafts_work(ranked: LLM, model: Path) -> None:
    several = answers(ranked, PROMPTS[:1], SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True))
    assert len(several) == 4
    scored = ranked.generate(PROMPTS[:2], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert scored[1].prompt_logprobs is not None
    with LLM(str(model), tensor_parallel_size=2, spec_method="ngram", spec_tokens=3) as drafting:
        assert answers(drafting, PROMPTS, GREEDY) == answers(ranked, PROMPTS, GREEDY)


def test_models_draft_beside_ranks(model: Path, ranked: LLM) -> None:
    options = {"model": str(model), "num_speculative_tokens": 3}
    with LLM(str(model), tensor_parallel_size=2, block_size=4, speculative_config=options) as drafting:
        for params in (GREEDY, DRAWN):
            assert answers(drafting, PROMPTS, params) == answers(ranked, PROMPTS, params)
        assert drafting._core.stats().spec_accepted_tokens > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_rounded_by_each_rank(model: Path, quantization: str) -> None:
    with LLM(str(model), tensor_parallel_size=2, quantization=quantization) as llm:
        assert answers(llm, PROMPTS, GREEDY) == [answers(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "checkpoint",
    [
        "awq-gemm-g128",
        "gptq-4bit-g32-desc-act",
        "fp8-block-moe",
        "ct-nvfp4",
        "mxfp4-gpt-oss",
        "bnb-nf4-double",
    ],
)
def test_quantized_checkpoints_are_divided(checkpoint: str, data: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    found = []
    for size in (1, 2):
        directory = str(data / "quantized" / checkpoint)
        with LLM(directory, quantization_activations="float", tensor_parallel_size=size, **options) as llm:
            found.append([tokens for tokens, _ in answers(llm, PROMPTS, GREEDY)])
    assert found[0] == found[1]


def test_adapters_share_steps_of_two_ranks(model: Path, tmp_path: Path) -> None:
    """Each answers as on one rank, alone and mixed; more than fit come and go; broken ones are refused; all sleep."""
    kinds: list[dict[str, Any]] = [{}, {"dora": True}, {"tables": True}, {"rank": 8, "use_rslora": True}]
    paths = [write_adapter(tmp_path / str(i), model, i, **kind) for i, kind in enumerate(kinds)]
    adapters = [None, *(LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths))]
    each = [adapters[i % len(adapters)] for i in range(len(PROMPTS))]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_model_len": 64}

    def tokens(llm: LLM, prompts: Any, given: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=given)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(str(model), **options) as whole:
        wanted = tokens(whole, PROMPTS, each)
    assert len(set(map(str, wanted[:5]))) == 5
    with LLM(str(model), tensor_parallel_size=2, fully_sharded_loras=True, **options) as ranked:
        assert tokens(ranked, PROMPTS, each) == wanted
        assert [tokens(ranked, [p], [one])[0] for p, one in zip(PROMPTS, each, strict=True)] == wanted
        with pytest.raises(ModelError, match="above --max-lora-rank"):
            ranked.add_lora(LoRARequest("high", 9, write_adapter(tmp_path / "high", model, 0, rank=17)))
        for level in (1, 2):
            ranked.sleep(level)
            ranked.wake_up()
            assert tokens(ranked, PROMPTS, each) == wanted


def unpacked(step: RunStep) -> ModelInput:
    return unpacked_step(step, np.zeros((0, 0), np.int32))


def test_steps_reach_other_ranks_whole() -> None:
    for step in steps():
        other = unpacked(packed_step(step, block_size=4))
        assert other.tokens_T.tolist() == step.tokens_T.tolist()
        assert other.logit_rows_L.tolist() == step.logit_rows_L.tolist()
        for b, length in enumerate(step.kv_len_B.tolist()):
            blocks = -(-length // 4)
            theirs = other.block_table_SM[other.slots_B[b], :blocks]
            assert theirs.tolist() == step.block_table_SM[step.slots_B[b], :blocks].tolist()
        assert other.adapters_B is None
        slots = np.arange(len(step.kv_len_B), dtype=np.int32) - 1
        adapted = unpacked(packed_step(msgspec.structs.replace(step, adapters_B=slots), block_size=4))
        assert adapted.adapters_B is not None
        assert adapted.adapters_B.tolist() == slots.tolist()
        assert other.states is None
        states = StateInput(slots + 1, slots * 0, slots * 0 + 1, np.array([[0, 1, 7], [0, 1, 9]], np.int32))
        own = unpacked(packed_step(msgspec.structs.replace(step, states=states), block_size=4)).states
        assert own is not None
        for sent, found in zip(astuple(states), astuple(own), strict=True):
            np.testing.assert_array_equal(found, sent)


def test_ranks_keep_block_tables_that_steps_append_to() -> None:
    kept, appended, unseen = (
        np.zeros((8, 64), np.int32),
        np.zeros((8, 64), np.int32),
        np.array([[0, 5]], np.int32),
    )
    for number, step in enumerate(steps()):
        new = np.array(
            [[slot, column, 7 + number] for slot in step.slots_B for column in (0, number)], np.int32
        )
        appended[new[:, 0], new[:, 1]] = new[:, 2]
        whole = msgspec.structs.replace(
            step, block_table_SM=appended, appended_C3=new, unseen_U2=unseen if number else None
        )
        sent = decode_command(encode(packed_step(whole, block_size=4)))
        assert isinstance(sent, RunStep)
        other = unpacked_step(sent, kept)
        assert other.block_table_SM.tolist() == kept.tolist() == appended.tolist()
        assert other.slots_B.tolist() == step.slots_B.tolist()
        assert other.appended_C3 is not None
        assert other.appended_C3.tolist() == new.tolist()
        assert (None if other.unseen_U2 is None else other.unseen_U2.tolist()) == (
            [[0, 5]] if number else None
        )
        with pytest.raises(EngineError, match="a step that is damaged"):
            unpacked_step(sent, kept[:1, :1])


def test_damaged_steps_are_refused() -> None:
    step = packed_step(steps()[0], block_size=4)
    tokens, *others = step.arrays
    with pytest.raises(EngineError, match="a step that is damaged"):
        unpacked(RunStep((tokens[:-1], *others)))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="a step that is damaged"):
        unpacked(RunStep(step.arrays, adapters=b"abc"))
    with pytest.raises(EngineError, match="a step that is damaged"):
        unpacked(RunStep(step.arrays, states=(tokens[:-4], b"", b"", b"")))


def test_states_are_copied_on_all_ranks() -> None:
    """A rank's worker and the engine's own cache get the same copies."""
    copied: list[Any] = []

    class Cache:
        spec, num_blocks, block_size = None, 1, 1

        def copy_states(self, copies: Any) -> None:
            copied.append(copies)

    worker = Worker(None, None, (0, 0))
    worker.load(Cache(), Cache())  # type: ignore[arg-type]

    class Others:
        def send(self, frame: bytes) -> None:
            worker.obey(decode_command(frame))

    ranks: Any = SimpleNamespace(peers=[Others()], earlier=[Others()])
    RankedKVCache(Cache(), ranks, None).copy_states([(1, 2)])  # type: ignore[arg-type]
    EarlierStages(ranks, 1).copy_states([(3, 4)])
    assert copied == [[(1, 2)], [(1, 2)], [(3, 4)]]


def test_what_cannot_be_divided_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be divided among 1, 2"):
        LLM(str(model), tensor_parallel_size=64)
    with pytest.raises(ConfigError, match="must be at least 1"):
        LLM(str(model), tensor_parallel_size=0)


def test_a_killed_rank_ends_requests_with_its_name(model: Path) -> None:
    before = rank_processes()
    with LLM(str(model), tensor_parallel_size=2) as llm:
        (rank,) = rank_processes() - before
        rank.terminate()  # ignored: the engine decides when its ranks end
        assert len(answers(llm, PROMPTS, GREEDY)) == len(PROMPTS)
        killer = threading.Timer(0.3, rank.kill)
        killer.start()
        endless = SamplingParams(max_tokens=60, ignore_eos=True, n=64)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            answers(llm, PROMPTS * 50, endless)
        killer.join()
    assert rank_processes() == before


def test_a_rank_that_cannot_start_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank_processes()
    monkeypatch.setattr("quire.ranks.processes.RANK_MODULE", "quire.no_such_module")
    with pytest.raises(QuireError, match=r"rank 1 ended with status 1(.|\n)*no_such_module"):
        LLM(str(model), tensor_parallel_size=2)
    assert rank_processes() == before


LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
MIXED: list[tuple[str, dict[str, Any]]] = [
    ("completions", LONG),
    ("completions", {**LONG, "stream": True}),
    ("completions", {**LONG, "n": 2, "temperature": 0.9, "seed": 1}),
    ("completions", {**LONG, "logprobs": 2, "prompt": "a b c " * 20}),
    ("completions", {**LONG, "structured_outputs": {"regex": "[a-f]{250,280}"}}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300, "stream": True}),
]


def has_ended_well(answer: httpx.Response) -> bool:
    """Whether a client can tell how its request ended: with a result, or an error that has a type."""
    assert answer.status_code in (200, 500, 503), answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.rstrip().rpartition("data: ")[2]
        return last == "[DONE]" or bool(json.loads(last)["error"]["type"])
    found = answer.json()
    return "choices" in found if answer.status_code == 200 else bool(found["error"]["type"])


def test_a_server_outlives_a_killed_rank(model: Path) -> None:
    before, files = rank_processes(), set(Path("/dev/shm").iterdir())
    server = start(model=str(model), maker="quire.client.start", tensor_parallel_size=2)
    try:
        (rank,) = rank_processes() - before
        ended: list[httpx.Response] = []

        def ask(path: str, body: dict[str, Any]) -> None:
            ended.append(server.post(f"/v1/{path}", body))

        clients = [threading.Thread(target=ask, args=MIXED[i % len(MIXED)]) for i in range(64)]
        for client in clients[:32]:
            client.start()
        with (
            server.client as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
        ):
            next(answer.iter_lines())  # the engine is among the steps of all
            with stopped(server.engine_pid):  # and has more to do, however fast the machine is
                for client in clients[32:]:
                    client.start()
                wait_until(lambda: http.get("/stats").json()["requests_live"] >= 16)
                rank.kill()
        for client in clients:
            client.join()
        assert len(ended) == len(clients)
        assert all(map(has_ended_well, ended))
        assert any("rank 1 was killed" in answer.text for answer in ended)
        short = {"prompt": "a", "max_tokens": 2}
        wait_until(lambda: server.post("/v1/completions", short).status_code == 200)
        assert rank not in rank_processes()
    finally:
        server.stop()
    assert rank_processes() == before
    assert set(Path("/dev/shm").iterdir()) <= files


def test_a_stopped_rank_counts_as_dead(model: Path) -> None:
    before = rank_processes()
    with LLM(str(model), tensor_parallel_size=2) as llm:
        (rank,) = rank_processes() - before
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="rank 1 gave no sign of life for 2 s and was stopped"):
            answers(llm, PROMPTS, GREEDY)
    assert rank_processes() == before


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_with_their_engine(model: Path, layout: dict[str, int], level: int) -> None:
    with LLM(str(model), **layout) as llm:
        wanted = answers(llm, PROMPTS, DRAWN)
        llm.sleep(level)
        llm.wake_up()
        assert answers(llm, PROMPTS, DRAWN) == wanted


def test_ranks_go_with_a_killed_engine(model: Path) -> None:
    before = rank_processes()
    server = start(model=str(model), maker="quire.client.start", tensor_parallel_size=2)
    try:
        (rank,) = rank_processes() - before
        os.kill(server.engine_pid, signal.SIGKILL)
        psutil.wait_procs([rank], timeout=60)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    finally:
        server.stop()
