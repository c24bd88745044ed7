"""`LLM`, with vLLM's share of memory."""

import quire
from vllm.engine.arg_utils import DEFAULTS


class LLM(quire.LLM):
    """A model ready to generate."""

    defaults = DEFAULTS


__all__ = ["LLM"]
