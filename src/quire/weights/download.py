"""Fetches models and adapters from the hub, or finds them in its cache.

`import huggingface_hub` is light; its client is imported when `snapshot_download` is first touched.
"""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from quire.errors import ModelError
from quire.weights.hub import existing, only_gguf

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w-]+)")  # owner/name:Q4_K_M
ABOUT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")  # config, tokenizer, chat template
SAFETENSORS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
TORCH = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
# Names that tools of quantization gave to the one file of weights.
OTHER_SAFETENSORS = ("gptq_model-*.safetensors", "*bit*.safetensors", "*awq*.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
SUBFOLDERS = ("*/*",)
MAX_ADAPTER = 16 << 30  # bytes of an adapter that a user has fetched
SHIPPED = Path(__file__).parent.parent / "assets"


def fetch_model(
    model: str, revision: str | None, download_dir: str | None, weights: bool, token: str | None
) -> Path:
    """Fetch the model of a hub id: see `quire.weights.hub.find_model`."""
    quantized = HUB_GGUF.fullmatch(model)
    if quantized is not None:
        pattern = f"*{quantized[2]}*.gguf"
        return only_gguf(_fetch(quantized[1], (pattern,), revision, download_dir, token), pattern)
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


def find_adapter(
    adapter: str,
    download_dir: str | None = None,
    token: str | None = None,
    roots: tuple[Path, ...] | None = None,
    ids: bool = True,
) -> Path:
    """Find an adapter's directory: a path, the name of a packaged one, or a hub id that is fetched. ModelError.

    With `roots`, which users' adapters have, a path must lie in one of them, links followed, and what is fetched is
    bounded. Nothing else on the disk changes the answer. `ids` says whether hub ids are allowed.
    """
    path = existing(adapter, roots)
    if path is not None and path.is_dir():
        return path.resolve()
    if HUB_ID.fullmatch(adapter):
        if (SHIPPED / adapter / ADAPTER[0]).is_file():
            return SHIPPED / adapter
        if not ids:
            raise ModelError(
                f"{adapter!r:.300} is not in a directory of --lora-root, and --no-lora-hub-ids is set"
            )
        local = roots is not None and not _check_size(adapter, token)
        return _fetch(adapter, ADAPTER, None, download_dir, token, local)
    if roots is not None:
        raise ModelError(f"{adapter!r:.300} is not in a directory of --lora-root, and no Hugging Face id")
    raise ModelError(f"{adapter!r:.300} is neither a directory here nor a Hugging Face id")


def _check_size(adapter: str, token: str | None) -> bool:
    """Whether the hub can be reached; if not, only cached files count. ModelError: the files are too large."""
    try:
        found = huggingface_hub.HfApi().model_info(adapter, files_metadata=True, token=token)
    except huggingface_hub.errors.HfHubHTTPError as error:
        raise ModelError(f"{adapter} cannot be fetched from the hub: {error}") from error
    except Exception:  # each version has other errors of connections
        return False
    size = sum(file.size or 0 for file in found.siblings or [] if file.rfilename in ADAPTER)
    if size > MAX_ADAPTER:
        raise ModelError(
            f"{adapter}: its files have {size} bytes; adapters of users have at most {MAX_ADAPTER}"
        )
    return True


def _fetch(
    model: str,
    patterns: tuple[str, ...],
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    local: bool = False,
) -> Path:
    """Fetch a repository's files, or find them cached; `local`: they must be."""
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                local_files_only=local,
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
