"""/v1/models: the names that the model is served under."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.serve.errors import not_found
from quire.serve.service import Service


class ServedModelCard(msgspec.Struct):
    """One served name."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "quire"
    parent: str | None = None
    system_fingerprint: str | None = None


class ModelList(msgspec.Struct):
    """Answer of /v1/models."""

    data: list[ServedModelCard]
    object: Literal["list"] = "list"


def model_list(service: Service, paths: bool) -> ModelList:
    """List the served names; with `paths`, where their files are."""
    names = (*service.names, *(adapter.name for adapter in service.adapters.loaded.all))
    return ModelList([model_card(service, name, paths) for name in names])


def model_card(service: Service, name: str, paths: bool) -> ServedModelCard:
    """404 if no model is served under that name."""
    info, own = service.front.info, name in service.names
    adapter = None if own else service.adapters.loaded.find(name)
    if not own and adapter is None:
        raise not_found(f"The model `{name}` does not exist", "model", "model_not_found")
    root, parent = (info.name, None) if adapter is None else (adapter.given, service.name)
    return ServedModelCard(
        name,
        service.created,
        root if paths else name,
        info.max_model_len,
        parent=parent,
        system_fingerprint=service.fingerprint(name),
    )
