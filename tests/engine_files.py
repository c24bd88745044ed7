"""Built engines changed as somebody would who knows how the checksums are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from quire.model.engine_dir import MANIFEST, WEIGHTS, Checksums


def rewrite(engine: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest; `change` gets it as JSON values."""
    path = engine / MANIFEST
    file = json.loads(path.read_text())
    change(file["engine"])
    seal(path, file["format"], json.dumps(file["engine"]))


def seal(path: Path, format: int, engine: str) -> None:
    checksum = xxhash.xxh3_64_hexdigest(engine.encode())
    path.write_text(f'{{"format":{format},"checksum":"{checksum}","engine":{engine}}}')


def rewrite_weights(engine: Path, change: Callable[[bytearray, dict[str, Any]], Any]) -> None:
    """Change the bytes of the weights; `change` gets them and the manifest."""
    path, manifest = engine / WEIGHTS, json.loads((engine / MANIFEST).read_text())["engine"]
    data = bytearray(path.read_bytes())
    change(data, manifest)
    path.write_bytes(data)
    sums = Checksums(np.frombuffer(bytes(data), np.uint8), len(manifest["checksums"])).result()
    rewrite(engine, lambda found: found.update(checksums=list(sums), size=len(data)))
