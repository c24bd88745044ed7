"""The names as users have them: a wheel, installed in an environment over the one that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from zoo import locked

COMPAT = Path(__file__).parents[1]
# The names can be imported in the tests' own process too, behind those of real packages.
sys.path.append(str(COMPAT / "src"))


def pytest_configure(config: pytest.Config) -> None:
    home = tempfile.TemporaryDirectory()  # a developer's own options stay out of the tests
    config.add_cleanup(home.cleanup)
    os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_RUNTIME_DIR"] = home.name


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with quire-compat. `bin` holds its scripts, `python` sees its packages."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.root)}))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which its scripts are found first."""
        here = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": here, "VIRTUAL_ENV": str(self.root)}

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the tests' own pip on this environment."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.variables)


def layered(root: Path) -> Installed:
    """An environment that sees all packages of the one that runs the tests."""
    venv.create(root, with_pip=False, symlinks=True)
    made = Installed(root)
    below = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in below]
    (made.packages / "below.pth").write_text("\n".join(lines) + "\n")
    return made


def shared(factory: pytest.TempPathFactory) -> Path:
    """A temporary directory that all processes of this test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheel of quire-compat, made once."""
    root = shared(tmp_path_factory) / "compat"
    root.mkdir(exist_ok=True)
    with locked(root):
        if not (root / "ready").exists():
            made = layered(root / "env")
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
            subprocess.run([*command, "--wheel-dir", str(root), str(COMPAT)], check=True)
            (wheel,) = root.glob("*.whl")
            done = made.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))
            assert done.returncode == 0, done.stderr
            (root / "ready").touch()
    return Installed(root / "env")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each snippet showed."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [
        value
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "snippet" and report.when == "call"
    ]
    if found:
        terminalreporter.write_sep("=", "snippets of the articles")
    for result in sorted(found, key=lambda one: str(one["file"])):
        terminalreporter.write_line(
            f"{result['file']:34} {'ran' if result['ran'] else 'FAILED':6} {str(result['output'])[:110]}"
        )
