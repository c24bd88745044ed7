"""From a model argument to a local directory or GGUF file: a path, or a hub id that is fetched or found cached.

`import huggingface_hub` is light; its client is imported when `snapshot_download` is first touched, so that
serving a local directory never pays for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from quire.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w-]+)")  # owner/name:Q4_K_M
LATER_PART = re.compile(r".*-(?!00001)[0-9]{5}-of-[0-9]{5}\.gguf")
ABOUT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")  # config, tokenizer, chat template
SAFETENSORS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
TORCH = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
# Names that tools of quantization gave to the one file of weights.
OTHER_SAFETENSORS = ("gptq_model-*.safetensors", "*bit*.safetensors", "*awq*.safetensors")
SUBFOLDERS = ("*/*",)


def find_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    token: str | None = None,
) -> Path:
    """The directory or GGUF file of `model`; an id is fetched to `download_dir` (default: the hub's cache).

    An id with a colon (owner/name:Q4_K_M) means the GGUF file whose name contains what follows it.
    torch weights are fetched only if there are no safetensors; without `weights`, for a tokenizer, neither is
    fetched. Raises ModelError.
    """
    if not model:
        raise ModelError("no model given; name a local directory or a Hugging Face id")
    path = Path(model).expanduser()
    if path.is_dir():
        return _gguf_inside(path)
    if path.exists():
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"{model} is a file; give a GGUF file, or the directory that holds config.json and the weights"
        )
    quantized = HUB_GGUF.fullmatch(model)
    if quantized is not None:
        pattern = f"*{quantized[2]}*.gguf"
        return _only_gguf(_fetch(quantized[1], (pattern,), revision, download_dir, token), pattern)
    if not HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model!r} is neither an existing directory nor a Hugging Face id such as owner/name"
        )
    if not weights:
        return _fetch(model, ABOUT, revision, download_dir, token)
    directory = _fetch(model, (*ABOUT, *SAFETENSORS), revision, download_dir, token)
    if not any(any(directory.glob(pattern)) for pattern in SAFETENSORS):
        directory = _fetch(model, (*ABOUT, *TORCH, *OTHER_SAFETENSORS), revision, download_dir, token)
    return directory


def _gguf_inside(directory: Path) -> Path:
    """The directory, or the GGUF file in it if that is the whole model."""
    if (directory / "config.json").exists() or not any(directory.glob("*.gguf")):
        return directory
    return _only_gguf(directory, "*.gguf")


def _only_gguf(directory: Path, pattern: str) -> Path:
    found = sorted(path for path in directory.glob(pattern) if not LATER_PART.fullmatch(path.name))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(
            f"{directory}: one model must match {pattern}, found {names}; name the file that you mean"
        )
    return found[0]


def _fetch(
    model: str, patterns: tuple[str, ...], revision: str | None, download_dir: str | None, token: str | None
) -> Path:
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                token=token,
                allow_patterns=list(patterns),
                ignore_patterns=list(SUBFOLDERS),
            )
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision!r}") from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model} is not a directory here and not a model on the hub (or private: `hf auth login`)"
        ) from error
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ModelError(f"{model}{at} is not in the cache and the hub cannot be reached: {error}") from error
    except huggingface_hub.errors.HFValidationError as error:
        raise ModelError(
            f"{model!r} is not an existing directory nor a valid Hugging Face id: {error}"
        ) from error
    except (OSError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ModelError(f"{model}{at} cannot be fetched from the hub: {error}") from error
