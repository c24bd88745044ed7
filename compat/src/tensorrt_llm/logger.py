"""TensorRT-LLM's logger by name: Python's `logging`, under the name quire."""

import logging

logger = logging.getLogger("quire")
