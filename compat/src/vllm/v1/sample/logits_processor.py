"""Classes that change logits before sampling."""

from quire.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
