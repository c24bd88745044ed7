"""Attention that sees chosen keys beside quantized weights, quantized caches, drafts and ranks: as alone and cold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.exactness.test_indexed import ALONE
from tests.exactness.test_recurrent import BASE, PARAMS, prompts, said
from tests.tiny import CHOOSING, INDEXED, STREAMS, write_checkpoint

NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8", **NGRAM},
    "nvfp4": {"quantization": "nvfp4", "kv_cache_dtype": "fp8", "block_size": 5},
    "int4 on two ranks": {"quantization": "int4", "tensor_parallel_size": 2},
    "bfloat16": {"dtype": "bfloat16", "num_gpu_blocks_override": 26},
}
ASKED = slice(2, 6)


@pytest.fixture(scope="module", params=[*INDEXED, *CHOOSING, *STREAMS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_depend_on_the_request_alone(name: str, model: Path) -> None:
    options, asked, params = OPTIONS[name], prompts()[ASKED], PARAMS[ASKED]
    plain = {key: options[key] for key in options if key not in NGRAM}
    cold = LLM(str(model), **{**ALONE, **plain})
    alone = [said(cold, [one], [own])[0] for one, own in zip(asked, params, strict=True)]
    cold.shutdown()
    llm = LLM(str(model), **{**BASE, **options, "max_num_batched_tokens": 19})
    for _ in range(2):  # the second time from what the first has left
        assert said(llm, asked, params) == alone
    llm.shutdown()
