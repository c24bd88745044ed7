"""Asks transformers for the model of a directory: no file in it runs code, and every weight comes from it.

The library knows directories that bring code along, that change another model, or that lack weights, which it then
draws at random. All of these are refused here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.files import read_json

# Parts of a directory that lead the library elsewhere: to another model, or to code.
ELSEWHERE = ("adapter_config.json", "custom_generate")
CODE = ("auto_map", "custom_pipelines")  # keys that name code in the directory
SHOWN = 5


def check_directory(directory: Path) -> None:
    """Raise ModelError if the library would look for code, or for another model."""
    for name in ELSEWHERE:
        if (directory / name).exists():
            raise ModelError(f"{directory / name}: a model is not read beside it: move it away")
    for path in sorted(directory.glob("*config.json")):
        waiting: list[Any] = [read_json(path)]
        while waiting:
            value = waiting.pop()
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            for key in value if isinstance(value, dict) else ():
                if key in CODE or (key.endswith("attn_implementation") and "/" in str(value[key])):
                    raise ModelError(
                        f"{path}: {key} names code, which never runs here; remove the key if transformers has the "
                        "model itself"
                    )


def load_pretrained(kind: Any, directory: Path, **options: Any) -> Any:
    """Load a model by one of the library's classes. ModelError if a tensor is missing, unexpected or mismatched."""
    check_directory(directory)
    model, report = kind.from_pretrained(
        directory,
        trust_remote_code=False,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
    )
    for what in ("missing", "unexpected", "mismatched"):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in report[f"{what}_keys"])
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ModelError(
                f"{directory}: {what} for {type(model).__name__}: tensors {', '.join(names[:SHOWN])}{more}"
            )
    if report.get("error_msgs"):
        raise ModelError(f"{directory}: {'; '.join(map(str, report['error_msgs']))[:1000]}")
    return model.eval()
