"""Adapters from Python: LoRARequest, LLM and AsyncLLM, sleep, built engines, vectors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError, RequestError
from quire.model.info import EngineLimits
from tests.adapter_files import write_adapter
from tests.tiny import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(1, 30))}
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., str]) -> str:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def adapters(path: str, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"a{i}", i + 1, write_adapter(folder / str(i), path, i)) for i in range(4)]


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, **OPTIONS)


def tokens(llm: LLM, adapter: Any) -> tuple[int, ...]:
    (output,) = llm.generate(PROMPT, GREEDY, lora_request=adapter, use_tqdm=False)
    assert output.lora_request == adapter
    return tuple(output.outputs[0].token_ids)


def test_adapters_are_loaded_at_their_first_request_and_answer_each_their_own(
    llm: LLM, adapters: list[LoRARequest]
) -> None:
    found = [tokens(llm, adapter) for adapter in (None, *adapters)]
    assert len(set(found)) == 5
    assert [tokens(llm, adapter) for adapter in (None, *adapters)] == found, "they were evicted meanwhile"
    assert llm.list_loras() == {1, 2, 3, 4}
    assert llm.remove_lora(4)
    assert not llm.remove_lora(4)
    assert llm.add_lora(adapters[3])
    assert not llm.add_lora(adapters[3])
    assert llm.pin_lora(1)
    assert not llm.pin_lora(9)


def test_requests_that_cannot_be_answered_are_refused(
    llm: LLM, path: str, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    tokens(llm, adapters[0])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate(PROMPT, GREEDY, lora_request=object())
    with pytest.raises(RequestError, match="as many adapters"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=adapters[:1])
    with pytest.raises(RequestError, match="one name and one number"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("other", 1, adapters[0].lora_path))
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("none", 7, str(tmp_path)))
    with pytest.raises(ModelError, match="neither a directory"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("none", 7, str(tmp_path / "absent")))
    high = write_adapter(tmp_path / "high", path, 0, rank=17)
    with pytest.raises(ModelError, match="above --max-lora-rank 16"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("high", 7, high))
    for name, number, place in (("", 1, "x"), ("x", 0, "x"), ("x", 1, "")):
        with pytest.raises(RequestError, match="LoRARequest"):
            LoRARequest(name, number, place)
    plain = LLM(path, max_model_len=64)
    with pytest.raises(RequestError, match="enable_lora=True"):
        plain.generate(PROMPT, GREEDY, lora_request=adapters[0])


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleep(llm: LLM, adapters: list[LoRARequest], level: int) -> None:
    before = [tokens(llm, adapter) for adapter in adapters[:2]]
    llm.sleep(level)
    llm.wake_up()
    assert [tokens(llm, adapter) for adapter in adapters[:2]] == before


def test_a_built_engine_takes_adapters(
    llm: LLM, path: str, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    build_engine(EngineConfig.from_options(model=path), tmp_path / "engine", EngineLimits())
    built = LLM(str(tmp_path / "engine"), **OPTIONS)
    assert [tokens(built, one) for one in (None, *adapters)] == [
        tokens(llm, one) for one in (None, *adapters)
    ]


def test_vectors_follow_the_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    plain, changed = (llm.embed(PROMPT, lora_request=one)[0].outputs.embedding for one in (None, adapters[0]))
    assert plain != changed


def test_added_tokens_belong_to_their_adapter(data: Path, tmp_path: Path) -> None:
    """Requests with the adapter read and sample them, alone and beside the base, on one rank and two."""
    expected = json.loads((data / "adapters" / "llama-added-tokens" / "expected.json").read_text())
    base, grown = str(data / "adapters" / "base-llama"), str(data / "adapters" / "llama-added-tokens")
    adapter, count = LoRARequest("grown", 1, grown), len(expected["greedy"][0])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in expected["prompts"]]
    mixed = [{"prompt_token_ids": [5, 6, 7]}, *prompts]
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    (plain,) = LLM(base, **options).generate(mixed[0], params, use_tqdm=False)
    options |= {"enable_lora": True, "lora_extra_vocab_size": 8}
    for size in (1, 2):
        with LLM(base, tensor_parallel_size=size, **options) as llm:
            outputs = llm.generate(mixed, params, use_tqdm=False, lora_request=[None, *[adapter] * 3])
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [list(plain.outputs[0].token_ids), *expected["greedy"]]
            with pytest.raises(RequestError, match=r"token id 321 is outside the vocabulary \(0 to 319\)"):
                llm.generate(prompts[0], params, use_tqdm=False)
            with pytest.raises(RequestError, match="stop_token_ids"):
                llm.generate(mixed[0], SamplingParams(stop_token_ids=[325]), use_tqdm=False)
    with pytest.raises(ConfigError, match="lora_extra_vocab_size"):
        LLM(str(write_checkpoint(tmp_path / "model", "gemma2")), **options)


def test_async_engines_take_them_too(llm: LLM, path: str, adapters: list[LoRARequest]) -> None:
    wanted = {one and one.lora_name: tokens(llm, one) for one in (None, *adapters)}
    engine = AsyncLLM.from_options(path, **OPTIONS)
    try:

        async def run(one: LoRARequest | None, number: int) -> tuple[int, ...]:
            last: Any = None
            async for output in engine.generate(PROMPT, GREEDY, str(number), lora_request=one):
                last = output
            return tuple(last.outputs[0].token_ids)

        async def whole() -> None:
            each = [None, *adapters] * 3
            found = await asyncio.gather(*(run(one, i) for i, one in enumerate(each)))
            assert found == [wanted[one and one.lora_name] for one in each]
            assert await engine.list_loras() == {1, 2, 3, 4}
            assert await engine.remove_lora(2)
            assert await engine.pin_lora(1)
            assert await engine.add_lora(adapters[1])

        asyncio.run(whole())
    finally:
        engine.shutdown()


def test_options_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least --max-loras 8"):
        EngineConfig.from_options(max_loras=8, max_cpu_loras=4)


def test_a_default_gives_way_to_what_is_given() -> None:
    for given, most, slots in (({}, 8, 8), ({"max_cpu_loras": 2}, 2, 2), ({"max_cpu_loras": 9}, 8, 9)):
        lora = EngineConfig.from_options(**given).lora
        assert (lora.most_at_once, lora.slots) == (most, slots)
    assert EngineConfig.from_options(max_loras=3).lora.slots == 3
