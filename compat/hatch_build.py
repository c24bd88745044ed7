"""Refuses to build for an environment that has a real package of one of our names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path(__file__).parent / "src"
# Lists what the interpreter has installed. -E leaves out the paths that pip's build isolation adds; the real
# environment of the interpreter remains.
LIST = "from quire_compat.real import installed; print(*installed())"


class CustomBuildHook(BuildHookInterface[Any]):
    """Runs before each build. pip runs it with the interpreter that it installs for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        code = f"import sys; sys.path.append({os.fspath(SOURCES)!r}); {LIST}"
        listed = subprocess.run(
            [sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True
        )
        if found := listed.stdout.split():
            sys.path.append(os.fspath(SOURCES))
            from quire_compat.real import message  # noqa: PLC0415

            raise SystemExit(message(found))
