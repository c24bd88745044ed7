"""Servers of notebooks."""

from quire.entrypoints.sglang.notebook import launch_server_cmd

__all__ = ["launch_server_cmd"]
