"""/v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's endpoints that change the adapters at run time."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.errors import EngineError, ModelError
from quire.fields import says
from quire.serve.errors import ErrorInfo, HttpError, invalid, not_found
from quire.serve.fields.shapes import Fields
from quire.serve.native.control import add_post, for_operators
from quire.serve.service import Service

Lora = Annotated[str, says("the adapter's name, which requests give as model")]


class LoadAdapterRequest(msgspec.Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: Lora
    lora_path: Annotated[str, says("a directory under --lora-root, or a Hugging Face id")]
    load_inplace: Annotated[bool, says("replace the adapter of that name")] = False
    pinned: Annotated[bool, says("keep it in memory")] = False


class UnloadAdapterRequest(msgspec.Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: Lora


LOAD_ADAPTER = Fields(
    path="/v1/load_lora_adapter",
    body=LoadAdapterRequest,
    ignored={"is_3d_lora_weight": "the layout of experts is found from the shapes"},
)
UNLOAD_ADAPTER = Fields(
    path="/v1/unload_lora_adapter",
    body=UnloadAdapterRequest,
    ignored={"lora_int_id": "an adapter is known by its name"},
)


def add_adapters(app: FastAPI, service: Service) -> None:
    """Add the routes, if --allow-runtime-lora asks for them."""
    if not service.config.allow_runtime_lora:
        return
    adapters = service.adapters

    async def load(http: HttpRequest) -> Response:
        body = await service.read(http, LOAD_ADAPTER)
        name = _named(body.lora_name)
        if not body.lora_path:
            raise invalid("lora_path must not be empty", "lora_path", "invalid_value")
        if name in service.names:
            raise invalid(f"{name} is the name of the model: choose another", "lora_name", "invalid_value")
        if adapters.loaded.find(name) is not None and not body.load_inplace:
            raise invalid(
                f"The adapter {name} is already loaded: unload it first, or set load_inplace",
                "lora_name",
                "invalid_value",
            )
        service.check_draining()
        try:
            await adapters.load(name, body.lora_path, body.pinned, owner=http.state.owner)
        except ModelError as error:
            raise not_found(str(error), "lora_path", "adapter_not_found") from error
        except EngineError as error:
            info = ErrorInfo(str(error), "invalid_request_error", "lora_path", "adapter_not_loaded")
            raise HttpError(400, info) from error
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload(http: HttpRequest) -> Response:
        body = await service.read(http, UNLOAD_ADAPTER)
        name = _named(body.lora_name)
        if adapters.loaded.find(name) is None:
            raise not_found(f"The adapter {name} is not loaded", "lora_name", "adapter_not_found")
        await adapters.unload(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    add_post(app, LOAD_ADAPTER.path, load)
    add_post(app, UNLOAD_ADAPTER.path, unload)
    for_operators(app, LOAD_ADAPTER.path, UNLOAD_ADAPTER.path)


def _named(name: str) -> str:
    if not name or not name.isprintable() or len(name) > 256:
        raise invalid("lora_name must be 1 to 256 printable characters", "lora_name", "invalid_value")
    return name
