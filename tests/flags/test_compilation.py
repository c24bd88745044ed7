"""vLLM's --compilation-config chooses the steps that are captured."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.plan import make_backend
from quire.errors import ConfigError
from quire.flags.compilation import read_graphs


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ('{"cudagraph_mode": "NONE"}', (True, (), None)),
        ({"cudagraph_mode": "full_decode_only", "level": 3}, (False, (), None)),
        ({"use_cudagraph": False}, (True, (), None)),
        (3, (False, (), None)),
        ("0", (False, (), None)),
        ({"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 8}, (False, ("1", "8"), 8)),
    ],
)
def test_its_keys_choose_graphs(given: Any, wanted: Any) -> None:
    assert read_graphs(given, False, (), None) == wanted


def test_options_of_its_keys_win() -> None:
    keys = {"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 8}
    assert read_graphs(keys, True, ("2",), 4) == (True, ("2",), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cudagraph_mode": "HALF"}, "cudagraph_mode must be NONE or PIECEWISE or .*, got HALF"),
        ({"cudagraph_capture_sizes": 4}, "capture sizes are a list"),
        ("{", "--compilation-config must be a JSON object"),
    ],
)
def test_what_nobody_has_is_refused(given: Any, message: str) -> None:
    config = EngineConfig.from_options(compilation_config=given, device="cpu")
    with pytest.raises(ConfigError, match=message):
        make_backend(config.device)
