"""Pipeline stages through the real processes: the bits of one rank, batches in flight, and typed ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cli import main
from quire.errors import ConfigError, EngineError
from tests.ranks.test_ranks import DRAWN, GREEDY, PROMPTS, answers, rank_processes
from tests.tiny import CONFIG, write_checkpoint

LONG = [{"prompt_token_ids": [(7 * i + k) % 300 for k in range(37)]} for i in (1, 1, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pipeline") / "model")


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[LLM]:
    with LLM(str(model), block_size=4) as llm:
        yield llm


@pytest.mark.parametrize("options", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}])
def test_stages_give_the_bits_of_one_rank(model: Path, whole: LLM, options: dict[str, Any]) -> None:
    small = {
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 40,
        "max_model_len": 64,
    }
    with LLM(str(model), **small, **options) as staged:
        for params in (GREEDY, DRAWN, SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True)):
            wanted = answers(whole, PROMPTS + LONG, params)
            assert answers(staged, PROMPTS + LONG, params) == wanted
            assert answers(staged, PROMPTS + LONG, params) == wanted  # from cached prefixes
        assert answers(staged, PROMPTS[:1], GREEDY) == answers(whole, PROMPTS[:1], GREEDY)
        scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
        mine, theirs = (llm.generate(LONG, scored, use_tqdm=False) for llm in (staged, whole))
        assert [o.prompt_logprobs for o in mine] == [o.prompt_logprobs for o in theirs]


def test_stages_of_two_ranks_give_the_bits_of_two_ranks(model: Path) -> None:
    with LLM(str(model), tensor_parallel_size=2) as flat:
        wanted = answers(flat, PROMPTS + LONG, DRAWN)
    with LLM(str(model), tensor_parallel_size=2, pipeline_parallel_size=2, async_scheduling=True) as staged:
        assert answers(staged, PROMPTS + LONG, DRAWN) == wanted
        json = SamplingParams(
            temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{4,8}")
        )
        assert len(staged.generate(["a"], json, use_tqdm=False)[0].outputs[0].text) >= 4


def test_drafts_of_lookups_work_over_stages(model: Path, whole: LLM) -> None:
    with LLM(str(model), pipeline_parallel_size=2, spec_method="ngram", spec_tokens=3) as drafting:
        assert answers(drafting, PROMPTS, GREEDY) == answers(whole, PROMPTS, GREEDY)


def test_a_killed_stage_ends_requests_with_its_name(model: Path) -> None:
    before = rank_processes()
    with LLM(str(model), pipeline_parallel_size=2) as llm:
        (rank,) = rank_processes() - before
        killer = threading.Timer(0.3, rank.kill)
        killer.start()
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            answers(llm, PROMPTS * 50, SamplingParams(max_tokens=60, ignore_eos=True, n=64))
        killer.join()
    assert rank_processes() == before


def test_a_plan_says_what_ranks_hold_and_send(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*options: str) -> dict[str, Any]:
        main(["plan", str(model), "--json", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole, ranked = plan(), plan("-tp", "2", "-pp", "2")
    width, layers = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    assert [stage["layers"] for stage in ranked["stages"]] == [[0, 2], [2, 3]]
    assert ranked["sent_bytes_per_token"] == 4 * width * 2 * layers
    assert ranked["passed_bytes_per_token"] == 4 * width
    assert ranked["messages_per_step"] == 2 * layers + 1 + 1  # sums, the next stage, logits
    assert 2 * sum(stage["kv_bytes_per_token"] for stage in ranked["stages"]) == whole["kv_bytes_per_token"]
    assert max(stage["weight_bytes"] for stage in ranked["stages"]) < whole["weight_bytes"]
    exact = plan("-tp", "2", "--exact-across-ranks")
    heads, inner = CONFIG["num_attention_heads"] * CONFIG["head_dim"], CONFIG["intermediate_size"]
    assert exact["sent_bytes_per_token"] == 4 * layers * (heads // 2 + inner // 2 + 32 + 32)
    slow = plan("-tp", "2", "--link-gbit", "0.001", "--link-us", "100000")
    assert slow["decode_tok_s_bound"] < 2 < plan("-tp", "2")["decode_tok_s_bound"]
    main(["plan", str(model), "-tp", "2", "-pp", "2"])
    assert "each rank, stage by stage" in capsys.readouterr().out


def test_what_has_no_stages_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="at most 3 stages"):
        LLM(str(model), pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="needs all layers of the target"):
        LLM(str(model), pipeline_parallel_size=2, speculative_model=str(model), num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="are 128 ranks; at most 64"):
        LLM(str(model), pipeline_parallel_size=2, tensor_parallel_size=64)
