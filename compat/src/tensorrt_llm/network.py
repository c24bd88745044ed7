"""Networks, which record what layers compute."""

from collections.abc import Iterable
from typing import Any

import quire.network
from quire.network import net_guard
from tensorrt_llm.plugin import PluginConfig


class Network(quire.network.Network):
    """A model as layers record it."""

    def __init__(self) -> None:
        super().__init__()
        self.plugin_config = PluginConfig()

    def set_named_parameters(self, named_parameters: Iterable[tuple[str, Any]]) -> None:
        """Does nothing: layers bring their weights."""


__all__ = ["Network", "net_guard"]
