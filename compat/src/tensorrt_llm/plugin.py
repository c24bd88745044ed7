"""`PluginConfig`: choices of kernels, which Quire makes itself."""

from functools import partial
from typing import Any

from quire_compat.dialect import Dialect
from tensorrt_llm.options import PLUGINS


class PluginConfig:
    """Plugins by name. A log line says of each what it means here; what would change a result is refused."""

    def __init__(self, **plugins: Any) -> None:
        self.update_from_dict(plugins)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "PluginConfig":
        return cls(**config)

    def update_from_dict(self, config: dict[str, Any]) -> None:
        for name, value in config.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a plugin. ConfigError if it would change a result, AttributeError if there is no such plugin."""
        if name not in PLUGINS:
            raise AttributeError(f"there is no plugin {name}")
        Dialect(foreign=PLUGINS).translated({name: value})
        super().__setattr__(name, value)

    def set_plugin(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """`set_NAME(value)` and `enable_NAME()` for each plugin."""
        for prefix in ("set_", "enable_"):
            plugin = name.removeprefix(prefix)
            if name.startswith(prefix) and plugin in PLUGINS:
                return partial(self._chosen, plugin)
        if name in PLUGINS:
            return None
        raise AttributeError(f"there is no plugin {name}")

    def _chosen(self, plugin: str, dtype: Any = "auto", **more: Any) -> "PluginConfig":
        setattr(self, plugin, dtype)
        self.update_from_dict(more)
        return self
