"""A GGUF file over HTTP: its own tokenizer, template and tokens, as offline."""

from __future__ import annotations

from pathlib import Path

from quire import LLM, SamplingParams
from tests.gguf_files import write_gguf
from tests.serve.running import start
from tests.tiny import write_checkpoint

REAL = "quire.client.start"


def test_a_file_is_served_as_it_answers_offline(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    directory = write_checkpoint(tmp_path / "model", "qwen3", **sizes)
    file = str(write_gguf(directory, tmp_path / "model.gguf", "qwen3", "Q8_0"))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(file, num_gpu_blocks_override=64)
    (text,) = llm.generate(["the cat"], params, use_tqdm=False)
    (chat,) = llm.chat([{"role": "user", "content": "the cat"}], params, use_tqdm=False)
    server = start(maker=REAL, model=file, num_gpu_blocks_override=64)
    try:
        body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = server.post("/v1/completions", {**body, "prompt": "the cat"}).json()
        assert answer["choices"][0]["token_ids"] == text.outputs[0].token_ids
        messages = [{"role": "user", "content": "the cat"}]
        answer = server.post("/v1/chat/completions", {**body, "messages": messages}).json()
        assert answer["choices"][0]["token_ids"] == chat.outputs[0].token_ids
    finally:
        assert server.stop() == 0
