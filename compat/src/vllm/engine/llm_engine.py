"""An engine for programs with a loop of their own."""

import quire
from vllm.engine.arg_utils import DEFAULTS


class LLMEngine(quire.LLMEngine):
    """An engine whose caller adds requests and takes steps."""

    defaults = DEFAULTS


__all__ = ["LLMEngine"]
