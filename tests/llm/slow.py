"""A logits processor that an engine loads by name: it delays requests that ask for it."""

from __future__ import annotations

import time
from typing import Any

from quire.logits_processor import BatchUpdate, LogitsProcessor
from quire.params import SamplingParams


class Slow(LogitsProcessor):
    """Sleeps 10 ms for each token of requests with extra_args {"slow": true}."""

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return bool((sampling_params.extra_args or {}).get("slow"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        time.sleep(0.01)
        return logits
