"""Joins the files that a GGUF model was split into. Knows no family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.weights.gguf.container import GGUFFile, TensorEntry
from quire.weights.tensor import Array

SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


class GGUFParts:
    """The metadata of the first file and the tensors of all. ModelError if a part is missing or another's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = GGUFFile(path)
        self._owner: dict[str, GGUFFile] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for file in [self.first, *(GGUFFile(other) for other in self._others())]:
            for name, entry in file.tensors.items():
                if name in self._owner:
                    raise ModelError(f"{file.path}: tensor {name} is also in {self._owner[name].path.name}")
                self._owner[name], self.tensors[name] = file, entry

    def keys_under(self, prefix: str) -> list[str]:
        return self.first.keys_under(prefix)

    def get(self, key: str) -> Any:
        return self.first.get(key)

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor as its file has them: uint8."""
        return self._owner[name].raw(name)

    def path_of(self, name: str) -> Path:
        return self._owner[name].path

    def _others(self) -> list[Path]:
        path, count = self.path, self.first.get("split.count")
        if count in (None, 0, 1):
            return []
        name = SPLIT.fullmatch(path.name)
        if type(count) is not int or name is None or int(name[3]) != count:
            raise ModelError(
                f"{path}: is one of {count!r} parts; they must be named NAME-00001-of-{count:05}.gguf"
            )
        if int(name[2]) != 1 or self.first.get("split.no") != 0:
            raise ModelError(
                f"{path}: is a later part; give the first one, {name[1]}-00001-of-{name[3]}.gguf"
            )
        return [path.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(2, count + 1)]
