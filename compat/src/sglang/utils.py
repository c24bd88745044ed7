"""Helpers of notebooks."""

from quire.entrypoints.sglang.notebook import print_highlight, terminate_process, wait_for_server

__all__ = ["print_highlight", "terminate_process", "wait_for_server"]
