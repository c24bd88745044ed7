"""What lies in packaging/ fits the server: the dashboard's metrics exist, and the image's command starts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from quire import __version__
from quire.cli import COMMANDS
from tests.serve.running import Server

PACKAGING = Path(__file__).parents[2] / "packaging"
if not PACKAGING.is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

# Shown with --machine-limits, or within a control group.
SOMETIMES = {
    "quire:engine_arithmetic_perc",
    "quire:engine_bandwidth_perc",
    "quire:memory_left_bytes",
    "quire:memory_used_bytes",
}


@pytest.fixture(scope="module")
def server(shipped: Server) -> Server:
    return shipped


def known_metrics(http: httpx.Client) -> set[str]:
    """Names of the samples of a server that has answered."""
    answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    assert answer.status_code == 200
    text = http.get("/metrics").text
    counted = re.findall(r"^# TYPE (quire:\w+) counter", text, re.MULTILINE)  # some have no samples yet
    return {*re.findall(r"^(quire:\w+)", text, re.MULTILINE), *counted}


def test_alerts_watch_metrics_that_exist(http: httpx.Client) -> None:
    (group,) = yaml.safe_load((PACKAGING / "alerts.yaml").read_text())["groups"]
    asked = {name for rule in group["rules"] for name in re.findall(r"quire:\w+", rule["expr"])}
    assert len(asked) >= 8
    assert asked <= known_metrics(http)
    assert "alerts.yaml" in yaml.safe_load((PACKAGING / "prometheus.yaml").read_text())["rule_files"]


def test_the_dashboard_asks_for_metrics_that_exist(http: httpx.Client) -> None:
    panels = json.loads((PACKAGING / "grafana" / "quire.json").read_text())["panels"]
    asked = {
        name for panel in panels for t in panel["targets"] for name in re.findall(r"quire:\w+", t["expr"])
    }
    assert len(asked) >= 10
    assert asked <= known_metrics(http) | SOMETIMES


def test_the_services_find_each_other() -> None:
    services = yaml.safe_load((PACKAGING / "compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((PACKAGING / "prometheus.yaml").read_text())["scrape_configs"][0]
    host, _, port = scraped["static_configs"][0]["targets"][0].partition(":")
    assert host in services
    assert services[host]["ports"] == [f"{port}:{port}"]
    mounted = [volume.partition(":")[0] for service in services.values() for volume in service["volumes"]]
    for path in mounted:
        assert not path.startswith("./") or (PACKAGING / path).exists(), path


def test_the_images_command_takes_the_options_of_serve() -> None:
    """As `docker run ... --model X` of vLLM's image does; --ipc=host and the cache's mount are Docker's own."""
    dockerfile = (PACKAGING / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    program, *arguments = json.loads(entry)
    assert program == "quire"
    given = shlex.split("--model quire-stories --max-model-len 512 --port 0 --check")
    command = [sys.executable, "-m", "quire.cli", *arguments, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_manual_names_every_command() -> None:
    page = (PACKAGING / "quire.1").read_text()
    listed = re.sub(r"[\"\\]", "", " ".join(re.findall(r"^\.BR? (.*)$", page, re.MULTILINE)))
    for name in COMMANDS:
        assert re.search(rf"(^| ){name}( |$)", listed), f"quire.1 leaves out {name}"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = (PACKAGING / "quire.service").read_text().replace("/opt/quire/bin/quire", sys.executable)
    (tmp_path / "quire.service").write_text(unit)
    command = ["systemd-analyze", "verify", str(tmp_path / "quire.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "quire.service" not in done.stderr, done.stderr


def test_the_conda_recipe_needs_what_the_wheel_needs() -> None:
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == __version__
    given = {
        line.replace(" ", "").replace("python-xxhash", "xxhash") for line in recipe["requirements"]["run"]
    }
    (listed,) = re.findall(
        r"^dependencies = \[(.*?)^\]", (PACKAGING.parent / "pyproject.toml").read_text(), re.M | re.S
    )
    needed = [line.partition(";")[0] for line in re.findall(r'"(.*)"', listed)]
    assert given == {"python>=3.10", *needed}
