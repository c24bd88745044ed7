"""pip installs the names, and refuses beside a real package. Nothing of a real package is ever replaced."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import COMPAT, Installed, layered


def pretend(env: Installed, name: str) -> None:
    """Put a package of that name into the environment, as pip would."""
    info = env.packages / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    module = env.packages / name.replace("-", "_")
    module.mkdir()
    (module / "__init__.py").write_text("REAL = True\n")


def run(env: Installed, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=env.variables, cwd=env.root)


def test_the_installed_names_are_found_behind_all_others(installed: Installed) -> None:
    code = "import sys, vllm; print(vllm.__file__); print(sys.path[-1])"
    done = run(installed, str(installed.python), "-c", code)
    assert done.returncode == 0, done.stderr
    file, last = done.stdout.split()
    assert Path(file).is_relative_to(last)
    assert Path(last).name == "quire-compat"


def test_pip_refuses_beside_a_real_package(tmp_path: Path) -> None:
    env = layered(tmp_path / "env")
    pretend(env, "tensorrt-llm")
    done = env.pip("install", "--no-deps", "--no-index", "--no-build-isolation", str(COMPAT))
    assert done.returncode != 0
    assert "does not install beside tensorrt-llm" in done.stdout + done.stderr
    assert "pip uninstall tensorrt-llm" in done.stdout + done.stderr


def test_a_real_package_that_comes_later_stays_whole(tmp_path: Path, installed: Installed) -> None:
    """A wheel that was built elsewhere cannot refuse: then imports and the script say which package they mean."""
    env = layered(tmp_path / "env")
    pretend(env, "vllm")
    (wheel,) = installed.root.parent.glob("*.whl")
    done = env.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    assert done.returncode == 0, done.stderr
    seen = run(env, str(env.python), "-c", "import vllm; print(vllm.REAL)")
    assert seen.stdout.split() == ["True"], seen.stderr
    script = run(env, str(env.bin / "vllm"), "serve")
    assert script.returncode == 1
    assert "does not install beside vllm" in script.stderr
