"""An older place of `resolve_chat_template`, under its older name."""

from vllm.renderers.hf import resolve_chat_template as resolve_hf_chat_template

__all__ = ["resolve_hf_chat_template"]
