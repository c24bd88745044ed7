"""Readers of quantized checkpoints: each is a `Checkpoint` around the one that holds the quantized tensors' fields.

The method comes from config.json, or from the file beside it in which some tools write it. A method without a reader is
refused: its packed bytes must never be taken for weights. A reader's module is imported when a checkpoint asks for it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.files import read_json
from quire.weights.checkpoint import Checkpoint

Reader = Callable[..., Checkpoint]  # (checkpoint, settings)

# By method, its reader's module and name.
READERS: Mapping[str, str] = {
    "auto-round": "gptq.auto_round_checkpoint",
    "awq": "gptq.AWQCheckpoint",
    "bitsandbytes": "bitsandbytes_squeezellm.bitsandbytes_checkpoint",
    "compressed-tensors": "scaled.ScaledCheckpoint",
    "fbgemm_fp8": "scaled.ScaledCheckpoint",
    "fp8": "scaled.ScaledCheckpoint",
    "gptq": "gptq.GPTQCheckpoint",
    "hqq": "hqq_torchao.hqq_checkpoint",
    "modelopt": "scaled.ScaledCheckpoint",
    "mxfp4": "mxfp4.MXFP4Checkpoint",
    "mxfp8": "scaled.ScaledCheckpoint",
    "quark": "scaled.ScaledCheckpoint",
    "squeezellm": "bitsandbytes_squeezellm.squeezellm_checkpoint",
    "torchao": "hqq_torchao.torchao_checkpoint",
}
# Other names of the same methods.
ALIASES = {
    "intel/auto-round": "auto-round",
    "sparseml": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
}
KEYS = ("quantization_config", "compression_config")  # of config.json
# Files beside a config.json that says nothing, and the method of one that does not name it.
METHODS = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint was quantized: the method's name and settings, and `where` they were found."""

    method: str
    settings: Mapping[str, Any]
    where: str

    def reader(self) -> Callable[[Checkpoint], Checkpoint]:
        """Make the reader, which turns quantized tensors into weights. Raises ModelError if the method has none."""
        if self.method not in READERS:
            raise ModelError(
                f"{self.where}: quantized checkpoints are not supported yet ({self.method}); use the original weights"
            )
        return partial(load_reader(self.method), settings=self.settings)

    def section(self) -> dict[str, Any]:
        """Give the settings as config.json would hold them."""
        return {**self.settings, "quant_method": self.method}


def load_reader(method: str) -> Reader:
    """Load the reader of a method in READERS."""
    module, _, name = READERS[method].partition(".")
    reader: Reader = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return reader


def find_quantization(config: Mapping[str, Any], where: str, directory: Path | None) -> Quantization | None:
    """Find the quantization of a model directory, or of a config alone; None for plain weights. Raises ModelError."""
    text = config.get("text_config")
    for about in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            if about.get(key) is not None:
                found = _described(about[key], f"{where}: {key}", None)
                if (kind := about.get("expert_dtype")) is not None:  # DeepSeek-V4 says it outside
                    found = replace(found, settings={"expert_dtype": kind, **found.settings})
                return found
    if directory is None:
        return None
    for path in (directory / name for name in METHODS):
        if path.exists():
            return _described(read_json(path), str(path), METHODS[path.name])
    return _named(directory)


def _named(directory: Path) -> Quantization | None:
    """Tell the method by the name of the only weight file, in repositories that say it nowhere else."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.pt")]
    if len(files) != 1 or files[0].name == "model.safetensors":
        return None
    name = files[0].name.lower()
    if match := re.match(r"sq-.*-w([34])-s\d", name):
        return Quantization("squeezellm", {"wbits": int(match[1])}, str(files[0]))
    if match := re.search(r"-w4-g(\d{1,5})-awq", name):
        return Quantization("awq", {"w_bit": 4, "q_group_size": int(match[1])}, str(files[0]))
    if match := re.search(r"(?:^|[-_.])([2348])bit[-_.](-?\d{1,5})g\b", name):
        settings = {"bits": int(match[1]), "group_size": int(match[2])}
        return Quantization("gptq", {**settings, "desc_act": "act" in name}, str(files[0]))
    return None


def _described(settings: Any, where: str, method: str | None) -> Quantization:
    if not isinstance(settings, dict):
        raise ModelError(f"{where}: not a JSON object; quantized checkpoints are not supported without it")
    named = settings.get("quant_method") or _method_of(settings) or method
    if not isinstance(named, str):
        return Quantization(f"quant_method {named!r:.80}", settings, where)
    return Quantization(ALIASES.get(named, named), settings, where)


def _method_of(settings: Mapping[str, Any]) -> str | None:
    """Guess the method of settings that do not name it."""
    producer = settings.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    if any(settings.get(key) for key in ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")):
        return "bitsandbytes"
    if "wbits" in settings:
        return "squeezellm"
    if "config_groups" in settings:
        return "compressed-tensors"
    return None
