"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tiny import write_checkpoint

# The same examples everywhere, and no deadline: a busy machine must not fail a test.
settings.register_profile(
    "quire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quire")

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the tests even after one that ran a command, which ignores it at its end."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def data() -> Path:
    """Real traces, prompts and tokenizers, where this checkout has them beside it."""
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data beside the checkout")
    return DATA


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The path of a tiny random checkpoint, made once for each set of arguments."""
    made: dict[str, str] = {}

    def make(family: str = "llama", dtype: str = "float32", **config: object) -> str:
        key = repr((family, dtype, sorted(config.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(family) / "model"
            made[key] = str(write_checkpoint(path, family, dtype, **config))
        return made[key]

    return make
