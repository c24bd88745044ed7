"""What SGLang's servers tell of themselves, and /flush_cache."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from quire import __version__
from quire.client.generation import Generation
from quire.errors import EngineError
from quire.flags.sglang import SAME
from quire.params import SamplingParams
from quire.serve.errors import unavailable
from quire.serve.native.control import add_post
from quire.serve.openapi import add_get, json_response
from quire.serve.service import Service
from quire.types import EngineStats, FinishReason, Request

STATS_TIMEOUT = 0.5


def add_sglang(app: FastAPI, service: Service) -> None:
    """Add the routes without a body."""

    async def model_info() -> Response:
        return json_response(_model(service))

    async def server_info() -> Response:
        stats = await service.engine.stats(STATS_TIMEOUT)
        return json_response({**_options(service), **_state(service, stats)})

    async def flush() -> Response:
        await service.engine.reset_prefix_cache()
        return Response("The prefix cache is empty.\n", media_type="text/plain")

    async def health_generate() -> Response:
        await _generate_one(service)
        return Response()

    async def loads() -> Response:
        return json_response(_loads(service, await service.engine.stats(STATS_TIMEOUT)))

    for path in ("/get_model_info", "/model_info"):
        add_get(app, path, model_info, dict[str, Any], "The model")
    for path in ("/get_server_info", "/server_info"):
        add_get(app, path, server_info, dict[str, Any], "Options and state of the server")
    add_get(app, "/flush_cache", flush, None, "Forget all cached prefixes")
    add_post(app, "/flush_cache", flush)
    add_get(app, "/health_generate", health_generate, None, "200 once the engine has computed a token")
    add_get(app, "/v1/loads", loads, dict[str, Any], "How much is running and waiting")


def _model(service: Service) -> dict[str, Any]:
    config, info = service.engine.config.model, service.front.info
    return {
        "model_path": config.model or info.name,
        "tokenizer_path": config.tokenizer or config.model or info.name,
        "is_generation": info.generates,
        "preferred_sampling_params": info.defaults or None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _options(service: Service) -> dict[str, Any]:
    """The options of the engine and the server by SGLang's names, without secrets."""
    ours: dict[str, Any] = asdict(service.config)
    for section in asdict(service.engine.config).values():
        ours |= section if isinstance(section, dict) else {"seed": section}
    secret = {"api_key", "api_key_file", "hf_token", "ssl_keyfile"}
    return {theirs: ours[name] for theirs, name in SAME.items() if name in ours and name not in secret}


def _state(service: Service, stats: EngineStats) -> dict[str, Any]:
    engine = service.engine
    info, block = service.front.info, engine.config.cache.block_size
    return {
        "status": "ready" if service.healthy else engine.state,
        "version": __version__,
        "context_length": info.max_model_len,
        "max_total_num_tokens": stats.num_blocks * block,
        "max_req_input_len": info.max_input_len or info.max_model_len - 1,
        "internal_states": [stats.as_dict()],
    }


def _loads(service: Service, stats: EngineStats) -> dict[str, Any]:
    block = service.engine.config.cache.block_size
    total = stats.num_blocks * block
    one = {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": stats.num_used_blocks * block,
        "max_total_num_tokens": total,
        "token_usage": stats.num_used_blocks * block / max(1, total),
        "cache_hit_rate": stats.prefix_hits / max(1, stats.prefix_queries),
        "max_running_requests": service.engine.config.scheduler.max_num_seqs,
    }
    aggregate = {
        "total_running_reqs": stats.num_running,
        "total_waiting_reqs": stats.num_waiting,
        "total_reqs": one["num_total_reqs"],
        "avg_token_usage": one["token_usage"],
    }
    return {
        "timestamp": time.time(),
        "version": __version__,
        "dp_rank_count": 1,
        "loads": [one],
        "aggregate": aggregate,
    }


async def _generate_one(service: Service) -> None:
    """Compute one token, or one vector. 503: the engine does not, or takes more than --health-timeout."""
    service.check_draining()
    request = msgspec.structs.replace(_probe(service), owner="health")
    try:
        with service.engine.submit([request]) as generation:
            await asyncio.wait_for(_ended(generation), service.config.health_timeout)
    except asyncio.TimeoutError:
        raise unavailable(f"no token within {service.config.health_timeout:g} s") from None


async def _ended(generation: Generation) -> None:
    while deltas := await generation.take():
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(delta.error or "the engine failed on a token")


def _probe(service: Service) -> Request:
    front = service.front
    number, token = service.next_request_id("health"), [0]
    if not front.info.generates:
        return front.pooled(number, token)
    return front.request(number, token, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
