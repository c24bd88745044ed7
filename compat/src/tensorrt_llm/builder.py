"""Builds: from a model or a network to an engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.build import BuiltEngine, EngineLimits, build_temporary
from quire.config import EngineConfig
from quire.errors import ConfigError
from tensorrt_llm.lowering import source_of
from tensorrt_llm.models import PretrainedModel
from tensorrt_llm.network import Network
from tensorrt_llm.options import BUILDING
from tensorrt_llm.plugin import PluginConfig

LIMITS = ("max_batch_size", "max_input_len", "max_seq_len")
OWN = (*LIMITS, "max_num_tokens", "plugin_config")
# Precisions by their names, and by those of TensorRT's types and flags.
PRECISIONS = {"int8": {"quantization": "int8"}, "fp8": {"quantization": "fp8"}}


class Engine(BuiltEngine):
    """Engine in a directory."""

    @classmethod
    def from_dir(cls, engine_dir: str | Path, rank: int = 0) -> "Engine":
        return cls(Path(engine_dir))


class BuildConfig:
    """Limits of an engine, None if there is none, and TensorRT-LLM's other options of a build.

    A log line says of each other option what it means here; what would change a result is refused.
    """

    def __init__(self, **options: Any) -> None:
        self.max_batch_size: int | None = None
        self.max_input_len: int | None = None
        self.max_seq_len: int | None = None
        self.max_num_tokens: int | None = None
        self.plugin_config = PluginConfig()
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option. ConfigError if it would change a result, AttributeError if there is none of this name."""
        if name not in OWN:
            if name not in BUILDING.foreign:
                raise AttributeError(f"BuildConfig has no option {name}")
            BUILDING.translated({name: value})
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "BuildConfig":
        plugins = PluginConfig.from_dict(config.get("plugin_config") or {})
        rest = {name: value for name, value in config.items() if name != "plugin_config"}
        return cls(**rest, plugin_config=plugins)

    @classmethod
    def from_json_file(cls, config_file: str | Path) -> "BuildConfig":
        return cls.from_dict(json.loads(Path(config_file).read_text()))

    def limits(self) -> EngineLimits:
        BUILDING.translated({"max_num_tokens": self.max_num_tokens})
        return EngineLimits(**{name: getattr(self, name) for name in LIMITS})

    def options(self) -> dict[str, int | None]:
        """Return the limits of an LLM that builds nothing."""
        return {name: getattr(self, name) for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}


def build(model: PretrainedModel, build_config: BuildConfig | None = None) -> BuiltEngine:
    """Build an engine; `save` writes it to a directory."""
    return build_temporary(model.config, (build_config or BuildConfig()).limits())


class BuilderConfig:
    """Builder's options: a precision, limits, and others as far as they mean something here."""

    def __init__(self, **options: Any) -> None:
        self.build = BuildConfig(**options)
        self.options: dict[str, Any] = {}

    def set_precision(self, precision: Any) -> None:
        """Set the precision by name (float32, float16, bfloat16, int8, fp8), or TensorRT's type or flag."""
        name = str(getattr(precision, "value", precision))
        self.options |= PRECISIONS.get(name, {"dtype": name})

    def set_flag(self, flag: Any) -> None:
        """Set a flag of TensorRT: precisions take effect, the others say what they mean here."""
        name = str(getattr(flag, "value", flag))
        if name in ("refit", "strip_plan", "obey_precision_constraints"):
            own = {"refit": "use_refit", "obey_precision_constraints": "precision_constraints"}.get(
                name, name
            )
            setattr(self.build, own, True)
        elif name != "tf32":  # products of floats are exact here
            self.set_precision(name)

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.build.workspace = size

    def __setattr__(self, name: str, value: Any) -> None:
        """Options of a build may also be set as attributes, such as `profiling_verbosity`."""
        if name in ("build", "options"):
            super().__setattr__(name, value)
        else:
            setattr(self.build, name, value)


class Builder:
    """Makes networks, and engines of them."""

    def create_network(self) -> Network:
        return Network()

    def create_builder_config(
        self, precision: Any = None, tensor_parallel: int = 1, int8: bool = False, **options: Any
    ) -> BuilderConfig:
        """`precision` is the type of the weights, the model's own by default; `int8` rounds weights and activations."""
        config = BuilderConfig(**options)
        if precision is not None:
            config.set_precision(precision)
        if int8:
            config.set_precision("int8")
        if tensor_parallel > 1:
            config.options["tensor_parallel_size"] = tensor_parallel
        return config

    def build_engine(self, network: Network, builder_config: BuilderConfig) -> BuiltEngine:
        """Build a network. ConfigError if it is empty."""
        if not isinstance(network, Network):
            raise ConfigError(f"build_engine takes a network, got {type(network).__name__}")
        config, limits = EngineConfig.from_options(**builder_config.options), builder_config.build.limits()
        if network.model is not None:
            return build_temporary(_merged(config, network.model), limits)
        return build_temporary(config, limits, source_of(network, config))


def _merged(config: EngineConfig, model: EngineConfig) -> EngineConfig:
    """Give a checkpoint's configuration the types that the build asks for."""
    asked = {name: getattr(config.model, name) for name in ("dtype", "quantization")}
    changes = {name: value for name, value in asked.items() if value != "auto"}
    return replace(model, model=replace(model.model, **changes))


__all__ = ["BuildConfig", "Builder", "BuilderConfig", "Engine", "EngineLimits", "build"]
