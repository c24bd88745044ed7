"""Adapters of a server: loaded from --lora-modules or at run time, found by the name of a request's model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from quire.client.adapters import LoadedAdapter, LoadedAdapters
from quire.client.client import AsyncEngine
from quire.config import EngineConfig
from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.errors import ConfigError, EngineError, ModelError, RequestError
from quire.lazy import Lazy
from quire.serve.options import ServerConfig
from quire.shares import largest_holder

if TYPE_CHECKING:
    from quire.weights import adapter as adapter_files
    from quire.weights import download
else:
    adapter_files, download = Lazy("quire.weights.adapter"), Lazy("quire.weights.download")

MOST_NAMES = 256
"""MOST_NAMES of adapters are loaded at run time."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CONFIG, EVERYBODY = "adapter_config.json", "*"


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of --lora-modules.

    Two fields are accepted for vLLM's sake: `base_model_name` is the served model, and `is_3d_lora_weight` follows from
    the adapter's shapes.
    """

    name: str
    path: str
    base_model_name: str | None = None
    pinned: bool = False
    is_3d_lora_weight: bool = False


def read_modules(given: tuple[str, ...]) -> list[LoraModule]:
    """Read the entries of --lora-modules: NAME=PATH, JSON objects, or a JSON list of them. ConfigError."""
    found: list[LoraModule] = []
    for text in given:
        name, equals, path = text.partition("=")
        if equals and "," not in text and not text.lstrip().startswith(("{", "[")):
            found.append(LoraModule(name, path))
            continue
        try:
            values = json.loads(text)
            found += msgspec.convert(values if isinstance(values, list) else [values], list[LoraModule])
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f'--lora-modules: {text!r:.200} is neither NAME=PATH nor JSON such as {{"name": "a", "path": "b"}}'
            ) from error
    for module in found:
        if not module.name or not module.path:
            raise ConfigError("--lora-modules: a name and a path must not be empty")
    if len({module.name for module in found}) < len(found):
        raise ConfigError("--lora-modules: two adapters have the same name")
    return found


def check_adapters(engine: EngineConfig, config: ServerConfig) -> None:
    """Raise ConfigError for options of adapters that are malformed, or given without --enable-lora."""
    read_modules(config.lora_modules)
    for name in ("lora_modules", "allow_runtime_lora", "lora_root", "lora_dir"):
        if getattr(config, name) and not engine.lora.enable_lora:
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
    if config.lora_dir is not None and not Path(config.lora_dir).expanduser().is_dir():
        raise ConfigError(f"--lora-dir {config.lora_dir}: there is no such directory")


class Adapters:
    """Loads and unloads adapters of a running engine. Use from one event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.loaded = LoadedAdapters()
        self._engine, self._config = engine, config
        self._directory = None if config.lora_dir is None else Path(config.lora_dir).expanduser()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # of names that are being loaded or unloaded
        self._arrivals = WeakValueDictionary[str, asyncio.Lock]()  # of names that requests load
        if engine.config.lora.enable_lora:
            engine.metrics.adapters = self.state

    async def load_given(self) -> None:
        """Load the adapters of --lora-modules. ConfigError or ModelError: one cannot be loaded."""
        for module in read_modules(self._config.lora_modules):
            try:
                await self.load(module.name, module.path, pinned=module.pinned, trusted=True)
            except EngineError as error:
                raise ModelError(f"--lora-modules {module.name}: {error}") from error

    async def bring(self, name: str | None, owner: str) -> None:
        """Load the adapter of --lora-dir that a request of `owner` names, if it is there and not loaded.

        Names are those of directories in it. RequestError: it cannot be loaded.
        """
        if self._directory is None or name is None or self.loaded.find(name) or not NAME.fullmatch(name):
            return
        path = self._directory / name
        async with self._arrivals.setdefault(name, asyncio.Lock()):
            if self.loaded.find(name) or not await asyncio.to_thread((path / CONFIG).is_file):
                return
            try:
                await self.load(name, str(path), owner=owner or EVERYBODY, root=self._directory)
            except (ModelError, EngineError) as error:
                if not self._engine.healthy:
                    raise
                raise RequestError(f"the adapter {name} cannot be loaded: {error}", "model") from error

    async def load(
        self,
        name: str,
        path: str,
        pinned: bool = False,
        trusted: bool = False,
        owner: str = "",
        root: Path | None = None,
    ) -> LoadedAdapter:
        """Load an adapter under a name, or replace the one that has it. Its owner holds it among MOST_NAMES.

        Unless it is `trusted`, its path must lie under `root`, or --lora-root without one. ModelError: there is no such
        directory; EngineError: it cannot be loaded.
        """
        roots = None if trusted else tuple(Path(root).expanduser() for root in self._config.lora_root)
        roots = roots if root is None else (root,)
        model, ids = self._engine.config.model, trusted or (root is None and self._config.lora_hub_ids)
        where = model.download_dir, model.hf_token, roots, ids
        async with self._locks.setdefault(name, asyncio.Lock()):
            directory = await asyncio.to_thread(download.find_adapter, path, *where)
            digest = str(await self._engine.do(LoadAdapter(str(directory), pinned, owner)))
            old = self.loaded.find(name)
            forgotten = self.loaded.remove(name) if old is not None and old.digest != digest else None
            spare = self._engine.config.lora.spare_tokens
            tokens = await asyncio.to_thread(adapter_files.table_rows, directory) if spare else 0
            found = self.loaded.add(
                name, path, str(directory), digest, pinned=pinned, tokens=tokens, owner=owner
            )
            if forgotten is not None:
                await self._engine.do(UnloadAdapter(forgotten))
        await self._make_room(found)
        return found

    async def _make_room(self, new: LoadedAdapter) -> None:
        """Forget the oldest name of the owner with most; operators' names stay."""
        named = [one for one in self.loaded.all if one.owner]
        if len(named) > MOST_NAMES:
            owner = largest_holder((one.owner, 1) for one in named)
            await self.unload(next(one.name for one in named if one.owner == owner and one is not new))

    async def unload(self, name: str) -> None:
        """Forget a loaded name; running requests finish with their adapter."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            digest = None if self.loaded.find(name) is None else self.loaded.remove(name)
            if digest is not None:
                await self._engine.do(UnloadAdapter(digest))

    def state(self) -> tuple[int, list[str], list[str]]:
        """Give metrics the most adapters of a step, and the names of running and waiting ones."""
        running: set[str] = set()
        waiting: set[str] = set()
        for times in self._engine.live_times():
            if times.request.adapter is not None:
                (running if times.scheduled else waiting).add(self.loaded.name_of(times.request.adapter))
        return self._engine.config.lora.most_at_once, sorted(running), sorted(waiting)
