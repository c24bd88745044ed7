"""The fields of the endpoints that load and unload adapters."""

from __future__ import annotations

import msgspec

from quire.serve.fields.shapes import Fields


class LoadAdapterRequest(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False


class UnloadAdapterRequest(msgspec.Struct):
    lora_name: str


LOAD_ADAPTER = Fields(
    path="/v1/load_lora_adapter",
    body=LoadAdapterRequest,
    taken={
        "lora_name": "the adapter's name, which requests give as model",
        "lora_path": "a directory under --lora-root, or a Hugging Face id",
        "load_inplace": "replace the adapter of that name",
        "pinned": "keep it in memory",
    },
    ignored={"is_3d_lora_weight": "the layout of experts is found from the shapes"},
)
UNLOAD_ADAPTER = Fields(
    path="/v1/unload_lora_adapter",
    body=UnloadAdapterRequest,
    taken={"lora_name": "the adapter's name"},
    ignored={"lora_int_id": "an adapter is known by its name"},
)
