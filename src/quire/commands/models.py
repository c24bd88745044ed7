"""`quire models`: lists the models in the hub's cache on this machine; says where one is; removes one."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import msgspec
from huggingface_hub import errors
from rich.console import Console
from rich.table import Column, Table

from quire import spelling
from quire.cli import Command, Options
from quire.config import option
from quire.devices import registry
from quire.errors import ConfigError, ModelError
from quire.files import read_json
from quire.lazy import Lazy
from quire.meter import in_bytes
from quire.weights.hub import ASSETS, local

if TYPE_CHECKING:
    from quire.engine import suggested
else:
    suggested = Lazy("quire.engine.suggested")

MOST = 0.9  # of the free memory, where the user asks for it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions(Options):
    """Options of all these commands."""

    download_dir: str | None = option(None, "The cache to look in; default is that of the hub's client.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(CacheOptions):
    """Options of `quire models`."""

    suggest: bool = option(False, "List models to try instead, and whether this machine has room for them.")
    json: bool = option(False, "Print JSON instead of a table.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(CacheOptions):
    """Options of `quire models where` and `quire models rm`."""

    model: str = option("", "A Hugging Face id of the list.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions(ModelOptions):
    """Options of `quire models rm`."""

    yes: bool = option(False, "Remove without a question.", short="-y")


def show(options: ListOptions) -> None:
    if options.suggest:
        return suggest(options.json)
    found = [
        {"model": repo.repo_id, "bytes": repo.size_on_disk, "type": _kind(_place(repo))}
        for repo in _repos(options.download_dir)
    ]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    table = Table("model", "size", "type")
    for row in found:
        table.add_row(row["model"], in_bytes(row["bytes"]), row["type"])
    for path in sorted(ASSETS.glob("*/config.json")):
        table.add_row(path.parent.name, "in the package", _kind(path.parent))
    Console().print(table, "`quire models --suggest` lists models that fit in this machine.", sep="\n")


def suggest(as_json: bool) -> None:
    """Show published models, with the room and the speed that this machine has for them."""
    backend = registry.make_backend()
    free, read = backend.free_memory(), suggested.read_gbs(backend)
    found = [
        {**msgspec.structs.asdict(each), "fits": each.fits(free), "tok_s_bound": each.rate(read)}
        for each in suggested.suggestions()
    ]
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(Column("model", no_wrap=True), "to fetch", "licence", "fits", "tok/s")
    for row in found:
        fits = "yes" if row["fits"] else "no" if row["memory"] > MOST * free else "tight"
        table.add_row(row["model"], in_bytes(row["bytes"]), row["licence"], fits, f"{row['tok_s_bound']:.0f}")
    first = suggested.first_model(free)
    Console().print(
        f"{in_bytes(free)} of memory are free and read at {read:.0f} GB/s: tok/s are bounds by that.",
        table,
        f"tight: with --gpu-memory-utilization {MOST}. {backend.name}.",
        f"Try: quire chat {first.model}" if first else "None fits.",
        sep="\n",
    )


def where(options: ModelOptions) -> None:
    own = local(options.model) if options.model else None  # a name in the package
    print(own or _place(_named(options)))


def remove(options: RemoveOptions) -> None:
    repo = _named(options)
    size = in_bytes(repo.size_on_disk)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{repo.repo_id} has {size}: say --yes to remove it")
        if input(f"Remove {repo.repo_id} ({size})? [y/N] ").strip().lower() not in ("y", "yes"):
            return
    shutil.rmtree(repo.repo_path)  # the client removes a commit wherever it is first: copies share commits
    print(f"removed {repo.repo_id}: {size}")


def _repos(download_dir: str | None) -> list[Any]:
    """Scan the cache; a place that is not there holds no model."""
    try:
        repos = huggingface_hub.scan_cache_dir(download_dir).repos
    except errors.CacheNotFound:
        return []
    return sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: str(repo.repo_id))


def _named(options: ModelOptions) -> Any:
    """Find the model in the cache. ModelError: it is not there."""
    if not options.model:
        raise ConfigError("name the model; `quire models` lists those that are here")
    repos = {repo.repo_id: repo for repo in _repos(options.download_dir)}
    name = options.model.partition(":")[0]
    if name not in repos:
        raise ModelError(f"{name} is not in the cache{spelling.nearest(name, repos)}")
    return repos[name]


def _place(repo: Any) -> Path:
    """Find the directory of the revision that was fetched last."""
    latest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
    return Path(repo.repo_path if latest is None else latest.snapshot_path)


def _kind(directory: Path) -> str:
    """Name what a directory holds: a model_type, or the kind of its files."""
    config, adapter = directory / "config.json", directory / "adapter_config.json"
    try:
        if adapter.is_file():
            return "adapter"
        if config.is_file():
            return str(read_json(config).get("model_type") or "unknown")
    except ModelError:
        return "unreadable"
    return "GGUF" if any(directory.glob("*.gguf")) else "unknown"


COMMAND = Command(show, ListOptions, uses=frozenset())
WHERE = Command(where, ModelOptions, arguments=("model",), uses=frozenset())
REMOVE = Command(remove, RemoveOptions, arguments=("model",), uses=frozenset())
