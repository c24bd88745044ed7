"""Modules: layers, and models made of them."""

from quire.network import Module, ModuleList
from quire.network import Parameter as Parameter

__all__ = ["Module", "ModuleList"]
