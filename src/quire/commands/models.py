"""`quire models`: lists the models in the hub's cache on this machine; says where one is; removes one."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from rich.console import Console
from rich.table import Table

from quire import spelling
from quire.cli import Command
from quire.config import check_options, option
from quire.errors import ConfigError, ModelError
from quire.files import read_json
from quire.weights.hub import ASSETS
from quire.weights.repository import in_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of all these commands."""

    download_dir: str | None = option(None, "The cache to look in; default is that of the hub's client.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(CacheOptions):
    """Options of `quire models`."""

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
    Console().print(table)


def where(options: ModelOptions) -> None:
    print(_place(_named(options)))


def remove(options: RemoveOptions) -> None:
    repo = _named(options)
    size = in_bytes(repo.size_on_disk)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{repo.repo_id} has {size}: say --yes to remove it")
        if input(f"Remove {repo.repo_id} ({size})? [y/N] ").strip().lower() not in ("y", "yes"):
            return
    commits = [revision.commit_hash for revision in repo.revisions]
    huggingface_hub.scan_cache_dir(options.download_dir).delete_revisions(*commits).execute()
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


COMMAND = Command(show, ListOptions, engine=False)
WHERE = Command(where, ModelOptions, arguments=("model",), engine=False)
REMOVE = Command(remove, RemoveOptions, arguments=("model",), engine=False)
