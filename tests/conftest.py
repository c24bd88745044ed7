"""Fixtures shared by all tests, the option `--isa`, and the report of what was skipped and why."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from quire import _native
from tests.older_cpu import pretend, write_site
from tests.shared import DATA, require
from tests.tiny import write_checkpoint

# The same examples everywhere, and no deadline: a busy machine must not fail a test.
settings.register_profile(
    "quire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quire")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isa", help="test as on a CPU whose best instruction set this is, for example avx2")
    parser.addoption(
        "--aarch64", metavar="PYTHON", help="a Python on 64-bit ARM that has Quire, also under QEMU"
    )


def pytest_configure(config: pytest.Config) -> None:
    home = tempfile.TemporaryDirectory()  # a developer's own options stay out of the tests
    config.add_cleanup(home.cleanup)
    os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_RUNTIME_DIR"] = home.name
    isa = config.getoption("isa")
    if isa is None:
        return
    sets = _native.available_isas()
    if isa not in sets:
        raise pytest.UsageError(f"--isa {isa}: this CPU has {', '.join(sets)}")
    pretend(isa)
    site = tempfile.TemporaryDirectory()
    config.add_cleanup(site.cleanup)
    write_site(Path(site.name), isa)
    os.environ["PYTHONPATH"] = os.pathsep.join([site.name, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by their reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    reasons = Counter(_reason(report) for report in skipped)
    terminalreporter.section(f"skipped: {len(skipped)}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place, _, text = report.longrepr
    reason = str(text).removeprefix("Skipped: ")
    return f"{reason} (all of {Path(place).name})" if isinstance(report, pytest.CollectReport) else reason


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the tests even after one that ran a command, which ignores it at its end."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def data() -> Path:
    """Real traces, prompts and tokenizers, where this checkout has them beside it."""
    return require(DATA)


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
