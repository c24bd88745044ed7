"""Weights of layers."""

from quire.network import Parameter

__all__ = ["Parameter"]
