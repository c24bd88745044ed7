"""An interrupt in a notebook ends the cell and leaves the model usable. Drives a real kernel."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

manager = pytest.importorskip(
    "jupyter_client.manager", reason="drives a notebook kernel: pip install ipykernel"
)
pytest.importorskip("ipykernel", reason="drives a notebook kernel: pip install ipykernel")

LOAD = "from quire import LLM, SamplingParams; llm = LLM(max_model_len=512)"
LONG = "llm.generate(['Once'] * 512, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)"
SHORT = "print(llm.generate('Once', SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0].text)"


@pytest.fixture
def kernel() -> Iterator[Any]:
    kernels, client = manager.start_new_kernel(startup_timeout=60)
    yield kernels, client
    client.stop_channels()
    kernels.shutdown_kernel(now=True)


def outcome(client: Any, request: str, interrupt: Any = None) -> tuple[str, str]:
    """The error's name of a cell ("" if none) and what it printed. Calls `interrupt` once the cell has begun."""
    error = printed = ""
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "execute_input" and interrupt is not None:
            time.sleep(random.uniform(0.05, 0.2))
            interrupt()
        elif message["msg_type"] == "error":
            error = message["content"]["ename"]
        elif message["msg_type"] == "stream":
            printed += message["content"]["text"]
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return error, printed


def test_an_interrupt_ends_the_cell_and_keeps_the_model(kernel: Any) -> None:
    kernels, client = kernel
    assert outcome(client, client.execute(LOAD))[0] == ""
    error, wanted = outcome(client, client.execute(SHORT))
    assert error == ""
    for _ in range(3):
        assert outcome(client, client.execute(LONG), kernels.interrupt_kernel)[0] == "KeyboardInterrupt"
        assert outcome(client, client.execute(SHORT)) == ("", wanted)
