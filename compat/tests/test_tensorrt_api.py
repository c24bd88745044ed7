"""TensorRT-LLM's Python names: builders, runners and the LLM API give what Quire's own API gives."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conftest import Installed
from quire import LLM, LoRARequest, SamplingParams
from quire.engine.directory import ASSETS, SHIPPED_MODEL

MODEL = ASSETS / SHIPPED_MODEL
PROMPTS = [[0, 40, 71, 95], [0, 33, 60]]


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM() as engine:
        yield engine


class Scripts:
    """Runs scripts with the installed names, in one directory."""

    def __init__(self, installed: Installed, directory: Path) -> None:
        self.installed, self.directory = installed, directory

    def run(self, code: str, fails: bool = False) -> tuple[str, str]:
        """What a script prints, and its log. `MODEL` is the shipped model's directory."""
        code = f"MODEL = {str(MODEL)!r}\n{textwrap.dedent(code)}"
        command = [str(self.installed.python), "-W", "error", "-c", code]
        done = subprocess.run(
            command,
            cwd=self.directory,
            capture_output=True,
            text=True,
            env=self.installed.variables,
            timeout=120,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout, done.stderr

    def value(self, code: str) -> Any:
        """The JSON that a script prints last."""
        return json.loads(self.run(code)[0].splitlines()[-1])


@pytest.fixture(scope="module")
def scripts(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(installed, tmp_path_factory.mktemp("tensorrt"))


def test_a_model_is_built_saved_and_run(scripts: Scripts, llm: LLM) -> None:
    found = scripts.value(
        f"""
        import json
        import tensorrt_llm
        from tensorrt_llm import BuildConfig
        from tensorrt_llm.runtime import ModelRunner, SamplingConfig

        llama = tensorrt_llm.LLaMAForCausalLM.from_hugging_face(model_dir=MODEL, dtype="bfloat16")
        engine = tensorrt_llm.build(llama, BuildConfig(max_batch_size=8, max_seq_len=64))
        engine.save("engine")
        runner = ModelRunner.from_dir(engine_dir="engine", rank=0, max_output_len=16)
        greedy = SamplingConfig(end_id=1, pad_id=2, max_new_tokens=99)
        ids = runner.generate(batch_input_ids={PROMPTS}, sampling_config=greedy)
        beams = runner.generate({PROMPTS}, SamplingConfig(end_id=1), num_beams=3, max_new_tokens=6, return_dict=True)
        drawn = runner.generate({PROMPTS}, top_k=0, top_p=0.9, random_seed=3, max_new_tokens=6, num_return_sequences=2)
        print(runner.max_seq_len)
        print(json.dumps([ids.tolist(), beams["output_ids"].tolist(), beams["sequence_lengths"].tolist(),
                          drawn.tolist()]))
        """
    )
    ids, beams, lengths, drawn = found
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[1])
    wanted = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    for row, prompt, output in zip(ids, PROMPTS, wanted, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        assert row == [tokens + [2] * (4 + 16 - len(tokens))]
    assert [len(row) for row in beams] == [3, 3]
    assert all(len(one) == 4 + 6 for row in beams for one in row)
    assert all(n <= len(p) + 6 for row, p in zip(lengths, PROMPTS, strict=True) for n in row)
    params = SamplingParams(n=2, top_p=0.9, seed=3, max_tokens=6)
    wanted = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    for row, prompt, output in zip(drawn, PROMPTS, wanted, strict=True):
        for mine, sample in zip(row, output.outputs, strict=True):
            assert mine[: len(prompt) + len(sample.token_ids)] == [*prompt, *sample.token_ids]


def test_prompts_of_pytorch_give_tensors(scripts: Scripts) -> None:
    pytest.importorskip("torch", reason="tensors are PyTorch's")
    out, _ = scripts.run(
        """
        import torch
        import tensorrt_llm
        from tensorrt_llm.runtime import ModelRunner, SamplingConfig

        tensorrt_llm.build(tensorrt_llm.LLaMAForCausalLM.from_hugging_face(MODEL)).save("e2")
        runner = ModelRunner.from_dir("e2")
        prompts = [torch.tensor([0, 40, 71], dtype=torch.int32)]
        found = runner.generate(prompts, max_new_tokens=4, return_dict=True, output_cum_log_probs=True)
        plain = runner.generate([prompts[0].tolist()], max_new_tokens=4)
        assert torch.equal(found["output_ids"], torch.from_numpy(plain)), (found, plain)
        assert found["cum_log_probs"].dtype == torch.float32 and (found["cum_log_probs"] < 0).all()
        print(found["output_ids"].dtype, tuple(found["output_ids"].shape))
        """
    )
    assert out.split("\n")[0] == "torch.int32 (1, 1, 7)"


def test_a_checkpoint_is_put_into_a_network_and_a_session_decodes(scripts: Scripts, llm: LLM) -> None:
    found = scripts.value(
        """
        import json
        import numpy as np
        import tensorrt_llm
        from tensorrt_llm.builder import Builder
        from tensorrt_llm.models import LLaMAForCausalLM
        from tensorrt_llm.runtime import GenerationSession, ModelConfig, SamplingConfig

        builder = Builder()
        network = builder.create_network()
        network.plugin_config.set_gpt_attention_plugin(dtype="float16")
        model = LLaMAForCausalLM.from_hugging_face(
            hf_model_dir=MODEL, dtype="float16", mapping=tensorrt_llm.Mapping(world_size=1, tp_size=1)
        )
        model.to_trt(network)
        config = builder.create_builder_config(
            precision="bfloat16", profiling_verbosity="detailed", max_batch_size=4, opt_batch_size=2
        )
        engine = builder.build_engine(network, config)
        assert engine.manifest.dtype == "bfloat16" and engine.manifest.limits.max_batch_size == 4
        sizes = ModelConfig(vocab_size=4096, num_layers=6, num_heads=4, num_kv_heads=2, hidden_size=128)
        session = GenerationSession(sizes, engine)
        session.setup(batch_size=2, max_context_length=4, max_new_tokens=5)
        padded = np.array([[0, 40, 71, 95], [0, 33, 60, 2]], np.int32)
        rows = session.decode(padded, [4, 3], SamplingConfig(end_id=1, pad_id=2))
        packed = np.array([0, 40, 71, 95, 0, 33, 60], np.int32)
        assert (session.decode(packed, [4, 3], SamplingConfig(end_id=1, pad_id=2)) == rows).all()
        print(json.dumps(rows.tolist()))
        """
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=[1])
    wanted = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    for row, prompt, output in zip(found, PROMPTS, wanted, strict=True):
        assert row[0][: len(prompt) + 5] == [*prompt, *output.outputs[0].token_ids]


def test_mistakes_are_named(scripts: Scripts) -> None:
    out, err = scripts.run(
        """
        import tensorrt as trt
        import tensorrt_llm
        from quire.errors import QuireError
        from tensorrt_llm import BuildConfig, Mapping
        from tensorrt_llm.builder import Builder
        from tensorrt_llm.network import net_guard
        from tensorrt_llm.runtime import GenerationSession, ModelConfig, SamplingConfig

        def says(run, *args, **kwargs):
            try:
                run(*args, **kwargs)
            except (QuireError, AttributeError) as error:
                print(error)
            else:
                print("nothing")

        builder = Builder()
        network = builder.create_network()
        with net_guard(network):
            pass
        says(builder.build_engine, network, builder.create_builder_config())
        says(tensorrt_llm.GPTForCausalLM.from_hugging_face, MODEL)
        says(tensorrt_llm.LLaMAForCausalLM.from_hugging_face)
        says(Mapping, world_size=2, tp_size=1)
        says(Mapping, world_size=2, pp_size=2)
        says(BuildConfig, gather_context_logits=True)
        says(BuildConfig, max_batch_sise=4)
        says(BuildConfig, max_num_tokens=4096, strongly_typed=True, gather_context_logits=0)
        config = builder.create_builder_config(precision=trt.float16)
        config.set_flag(trt.BuilderFlag.BF16)
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
        print(config.options)
        engine = tensorrt_llm.build(tensorrt_llm.LLaMAForCausalLM.from_hugging_face(MODEL))
        says(GenerationSession, ModelConfig(num_layers=32), engine)
        says(GenerationSession, ModelConfig(), b"engine")
        session = GenerationSession(ModelConfig(), engine)
        says(session.decode_batch, [[1]], SamplingConfig())
        says(session.setup, 1, 1000, 1000)
        session.setup(1, 2, 2)
        says(session.decode_batch, [[1, 2, 3]], SamplingConfig())
        says(session.runner.generate, [[1]], no_repeat_ngram_size=3)
        says(session.runner.generate, [[1]], stop_words_list=[[1, 2]])
        says(session.runner.generate, [[1]], top_q=3)
        """
    )
    lines = out.splitlines()
    for line, said in zip(
        lines,
        (
            "the network is empty",
            "is a LlamaForCausalLM, not one of GPTForCausalLM",
            "takes one checkpoint: hf_model_dir or model_dir",
            "world_size 2 must equal tp_size 1",
            "pp_size must be 1, got 2; use tp_size",
            "--gather_context_logits is not supported: requests ask for log-probabilities",
            "BuildConfig has no option max_batch_sise",
            "nothing",
            "{'dtype': 'bfloat16'}",
            "num_layers is 32, and the engine was built with 6",
            "takes what build_engine returned, or the directory of an engine",
            "call setup(batch_size",
            "are more than the engine's 1024 positions",
            "do not fit setup's batch_size 1 and max_context_length 2",
            "no_repeat_ngram_size of SamplingConfig is not supported",
            "words of one token",
            "SamplingConfig has no top_q",
        ),
        strict=True,
    ):
        assert said in line
    assert "--workspace changes nothing: Quire plans its workspace ahead" in err


QUICKSTART = """
    from tensorrt_llm import LLM, SamplingParams

    def main():
        llm = LLM(model=MODEL)
        prompts = ["Once upon a time", "The little dog said"]
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
        for output in llm.generate(prompts, params):
            print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

    if __name__ == "__main__":
        main()
"""


def test_the_llm_api(scripts: Scripts, llm: LLM) -> None:
    out, err = scripts.run(QUICKSTART)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=32)
    outputs = llm.generate(["Once upon a time", "The little dog said"], params, use_tqdm=False)
    assert out.splitlines() == [
        f"Prompt: {one.prompt!r}, Generated text: {one.outputs[0].text!r}" for one in outputs
    ]
    assert "changes nothing" not in err


def test_the_llm_api_awaits_streams_and_constrains(scripts: Scripts, llm: LLM) -> None:
    found = scripts.value(
        """
        import asyncio, json
        from tensorrt_llm import BuildConfig
        from tensorrt_llm._tensorrt_engine import LLM
        from tensorrt_llm.llmapi import GuidedDecodingParams, KvCacheConfig, SamplingParams

        config = BuildConfig()
        config.max_batch_size = 16
        config.max_num_tokens = 64
        llm = LLM(MODEL, build_config=config, kv_cache_config=KvCacheConfig(max_tokens=2048, enable_block_reuse=False),
                  backend="pytorch", trust_remote_code=True)
        assert llm.config.scheduler.max_num_batched_tokens == 64 and not llm.config.cache.enable_prefix_caching
        one = llm.generate("One day", SamplingParams(max_tokens=6))

        async def stream():
            texts = []
            async for output in llm.generate_async("One day", SamplingParams(max_tokens=6), streaming=True):
                texts.append(output.outputs[0].text)
            return texts

        async def both():
            six = SamplingParams(max_tokens=6)
            return await asyncio.gather(*(llm.generate_async(prompt, six) for prompt in ("One day", "A")))

        texts = asyncio.run(stream())
        awaited = [output.outputs[0].text for output in asyncio.run(both())]
        regex = GuidedDecodingParams(regex="[0-9]{3}")
        guided = llm.generate(["Once"], SamplingParams(guided_decoding=regex))[0].outputs[0].text
        beams = llm.generate("One day", SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=4)).outputs
        later = llm.generate_async([0, 40, 71], SamplingParams(max_tokens=3)).result(60).outputs[0].token_ids
        llm.save("saved")
        again = LLM("saved").generate("One day", SamplingParams(max_tokens=6)).outputs[0].text
        print(json.dumps([one.outputs[0].text, texts, awaited, guided, len(beams), later, again]))
        """
    )
    one, texts, awaited, guided, beams, later, again = found
    greedy = SamplingParams(temperature=0, max_tokens=6)
    wanted = [output.outputs[0].text for output in llm.generate(["One day", "A"], greedy, use_tqdm=False)]
    assert one == texts[-1] == wanted[0] == again
    assert awaited == wanted
    assert len(texts) > 1
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert len(guided) == 3
    assert guided.isdigit()
    assert (beams, len(later)) == (2, 3)


def test_logits_are_changed_in_place(scripts: Scripts) -> None:
    pytest.importorskip("torch", reason="the processor's logits are a tensor of PyTorch")
    out, _ = scripts.run(
        """
        import torch
        from tensorrt_llm import LLM
        from tensorrt_llm.sampling_params import LogitsProcessor, SamplingParams

        class Only(LogitsProcessor):
            def __call__(self, req_id, logits, token_ids, stream_ptr, client_id):
                assert logits.shape == (1, 1, 4096) and len(token_ids) == 1
                mask = torch.full_like(logits, float("-inf"))
                mask[:, :, 42 + len(token_ids[0])] = 0
                logits += mask

        llm = LLM(MODEL)
        params = SamplingParams(temperature=0.8, max_tokens=4, logits_processor=[Only()], logprobs=True)
        (sample,) = llm.generate("One day", params).outputs
        print(sample.token_ids, len(sample.logprobs))
        """
    )
    assert out == "[42, 43, 44, 45] 4\n"


def test_options_of_the_llm_api(scripts: Scripts) -> None:
    out, err = scripts.run(
        """
        from quire.errors import QuireError
        from tensorrt_llm.commands.serve import server_words
        from tensorrt_llm.llmapi import (CudaGraphConfig, KvCacheConfig, MoeConfig, NGramDecodingConfig, QuantAlgo,
                                         QuantConfig, SamplingParams)
        from tensorrt_llm.llmapi.llm import engine_options

        def says(**options):
            try:
                print(sorted(engine_options(options).items()))
            except (QuireError, AttributeError) as error:
                print(error)

        says(max_batch_size=8, max_seq_len=512, tensor_parallel_size=2, moe_config=MoeConfig(backend="x"))
        says(cuda_graph_config=CudaGraphConfig(batch_sizes=[8, 1], enable_padding=True))
        says(cuda_graph_config={"max_batch_size": 64, "enable_padding": False})
        says(cuda_graph_config={"batch_sizes": [1, 2], "max_batch_size": 2})
        says(cuda_graph_config=None)
        says(use_cuda_graph=False)
        says(use_cuda_graph=True, cuda_graph_config=CudaGraphConfig(max_batch_size=0))
        says(cuda_graph_config={"max": 1})
        says(cuda_graph_config={"batch_sizes": [1, 2], "max_batch_size": 4})
        says(cuda_graph_config={"batch_sizes": ["a"]})
        says(cuda_graph_config=True)
        print(server_words(engine_options(dict(cuda_graph_config={"batch_sizes": [4, 2]}))))
        says(quant_config=QuantConfig(quant_algo=QuantAlgo.W8A16, kv_cache_quant_algo="FP8"))
        says(speculative_config=NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2))
        says(speculative_config={"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "x"})
        says(kv_cache_config={"free_gpu_memory_fraction": 0.4, "dtype": "fp8", "tokens_per_block": 32})
        says(kv_cache_config=KvCacheConfig(max_attention_window=[64]))
        says(kv_cache_config={"fraction": 1})
        says(context_parallel_size=2)
        for given in (dict(no_repeat_ngram_size=2), dict(best_of=2), dict(return_context_logits=True)):
            try:
                SamplingParams(**given).params()
            except QuireError as error:
                print(error)
        """
    )
    for line, said in zip(
        out.splitlines(),
        (
            "('max_model_len', 512), ('max_num_seqs', 8), ('tensor_parallel_size', 2)]",
            "[('cudagraph_capture_sizes', ('8', '1')), ('gpu_memory_utilization', 0.9)]",
            "[('gpu_memory_utilization', 0.9), ('max_cudagraph_capture_size', 64)]",
            "[('cudagraph_capture_sizes', ('1', '2')), ('gpu_memory_utilization', 0.9), "
            "('max_cudagraph_capture_size', 2)]",
            "[('enforce_eager', True), ('gpu_memory_utilization', 0.9)]",
            "[('enforce_eager', True), ('gpu_memory_utilization', 0.9)]",
            "[('gpu_memory_utilization', 0.9)]",
            "cuda_graph_config: CudaGraphConfig.__init__() got an unexpected keyword argument 'max'",
            "cuda_graph_config: give batch_sizes or max_batch_size, and not both",
            "cuda_graph_config: batch_sizes must be a list of numbers, and max_batch_size a number",
            "cuda_graph_config: 'bool' object has no attribute 'options'",
            "['--gpu-memory-utilization=0.9', '--cudagraph-capture-sizes', '4', '2']",
            "('kv_cache_dtype', 'fp8'), ('quantization', 'int8wo')",
            "{'method': 'ngram', 'prompt_lookup_max': 2, 'num_speculative_tokens': 4}",
            "{'method': 'eagle3', 'num_speculative_tokens': 3, 'model': 'x'}",
            "[('block_size', 32), ('gpu_memory_utilization', 0.4), ('kv_cache_dtype', 'fp8')]",
            "--max_attention_window [64] is not supported: attention sees what the model says",
            "kv_cache_config: ",
            "--context_parallel_size 2 is not supported: ranks divide layers and stages",
            "no_repeat_ngram_size is not supported: use repetition_penalty",
            "best_of 2 without use_beam_search must equal n 1",
            "return_context_logits is not supported: use prompt_logprobs",
        ),
        strict=True,
    ):
        assert said in line
    assert "--moe_config changes nothing: Quire has its own kernels" in err
    assert err.count("--enable_padding changes nothing: steps are always padded") == 1


def test_a_network_of_its_layers_is_the_loaded_model(scripts: Scripts) -> None:
    """The weights are assigned as for TensorRT-LLM: fused projections, and arguments about ranks."""
    out, _ = scripts.run(
        """
        import json
        import numpy as np
        import tensorrt_llm
        from pathlib import Path
        from quire.weights.checkpoint import open_checkpoint
        from tensorrt_llm.builder import Builder
        from tensorrt_llm.functional import AttentionMaskType, PositionEmbeddingType
        from tensorrt_llm.layers import Attention, ColumnLinear, Embedding, GatedMLP, RmsNorm
        from tensorrt_llm.module import Module, ModuleList
        from tensorrt_llm.network import net_guard

        c = json.loads(Path(MODEL, "config.json").read_text())

        class Layer(Module):
            def __init__(self, i):
                super().__init__()
                self.input_layernorm = RmsNorm(c["hidden_size"], eps=c["rms_norm_eps"], dtype="float16")
                self.attention = Attention(
                    local_layer_idx=i, hidden_size=c["hidden_size"], num_attention_heads=c["num_attention_heads"],
                    num_kv_heads=c["num_key_value_heads"], max_position_embeddings=c["max_position_embeddings"],
                    dtype="float16", attention_mask_type=AttentionMaskType.causal, bias=False, tp_group=None, tp_size=1,
                    position_embedding_type=PositionEmbeddingType.rope_gpt_neox,
                    rotary_embedding_base=c["rope_theta"])
                self.mlp = GatedMLP(hidden_size=c["hidden_size"], ffn_hidden_size=c["intermediate_size"],
                                    hidden_act=c["hidden_act"], dtype="float16", bias=False, tp_size=1)
                self.post_layernorm = RmsNorm(normalized_shape=c["hidden_size"], eps=c["rms_norm_eps"])

            def forward(self, hidden_states):
                hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states))
                return hidden_states + self.mlp(self.post_layernorm(hidden_states))

        class Llama(Module):
            def __init__(self):
                super().__init__()
                self.vocab_embedding = Embedding(c["vocab_size"], c["hidden_size"], dtype="float16")
                self.layers = ModuleList([Layer(i) for i in range(c["num_hidden_layers"])])
                self.ln_f = RmsNorm(normalized_shape=c["hidden_size"], eps=c["rms_norm_eps"])
                self.lm_head = ColumnLinear(c["hidden_size"], c["vocab_size"], bias=False, gather_output=True)
                self.lm_head.weight = self.vocab_embedding.weight

            def forward(self, ids):
                x = self.vocab_embedding(ids)
                for layer in self.layers:
                    x = layer(x)
                return self.lm_head(self.ln_f(x))

        model, weights = Llama(), open_checkpoint(Path(MODEL)).get
        model.vocab_embedding.weight.value = weights("model.embed_tokens.weight")
        model.ln_f.weight.value = weights("model.norm.weight")
        for i, layer in enumerate(model.layers):
            at = f"model.layers.{i}."
            layer.input_layernorm.weight.value = weights(at + "input_layernorm.weight")
            layer.post_layernorm.weight.value = weights(at + "post_attention_layernorm.weight")
            layer.attention.qkv.weight.value = np.concatenate(
                [weights(f"{at}self_attn.{name}_proj.weight") for name in "qkv"])
            layer.attention.dense.weight.value = weights(at + "self_attn.o_proj.weight")
            layer.mlp.fc.weight.value = weights(at + "mlp.gate_proj.weight")
            layer.mlp.gate.weight.value = weights(at + "mlp.up_proj.weight")
            layer.mlp.proj.weight.value = weights(at + "mlp.down_proj.weight")

        builder = Builder()
        network = builder.create_network()
        with net_guard(network):
            network.set_named_parameters(model.named_parameters())
            model(network.add_input("input_ids")).mark_output("logits", "float16")
        mine = builder.build_engine(network, builder.create_builder_config(precision="bfloat16"))
        loaded = tensorrt_llm.build(tensorrt_llm.LLaMAForCausalLM.from_hugging_face(MODEL))
        print((mine.directory / "weights.bin").read_bytes() == (loaded.directory / "weights.bin").read_bytes())
        """
    )
    assert out == "True\n"


def test_every_module_has_the_names_that_it_lists(scripts: Scripts) -> None:
    out, _ = scripts.run(
        """
        import importlib, pkgutil
        import tensorrt_llm

        for found in pkgutil.walk_packages(tensorrt_llm.__path__, "tensorrt_llm."):
            module = importlib.import_module(found.name)
            for name in getattr(module, "__all__", []):
                getattr(module, name)
            print(found.name)
        """
    )
    assert {"tensorrt_llm.hlapi", "tensorrt_llm.models.modeling_utils", "tensorrt_llm.commands.bench"} <= set(
        out.split()
    )


def test_adapters_of_the_llm_api(scripts: Scripts) -> None:
    found = scripts.value(
        f"""
        import json
        from tensorrt_llm import LLM
        from tensorrt_llm.executor import LoRARequest
        from tensorrt_llm.lora_helper import LoraConfig

        adapter = {str(ASSETS / "quire-stories-lora-oldtale")!r}
        llm = LLM(MODEL, lora_config=LoraConfig(lora_dir=[adapter], max_lora_rank=64, max_loras=2, max_cpu_loras=2))
        outputs = llm.generate(["Once upon a time"] * 2, lora_request=[None, LoRARequest("old", 1, adapter)])
        print(json.dumps([output.outputs[0].text for output in outputs]))
        """
    )
    params, adapter = SamplingParams(temperature=0, max_tokens=32), ASSETS / "quire-stories-lora-oldtale"
    with LLM(enable_lora=True, max_lora_rank=64) as llm:
        requests = [None, LoRARequest("old", 1, str(adapter))]
        wanted = llm.generate(["Once upon a time"] * 2, params, use_tqdm=False, lora_request=requests)
    assert found == [output.outputs[0].text for output in wanted]
    assert found[0] != found[1]


PAGE = Path(__file__).parents[2] / "docs" / "compat-tensorrt-llm.md"
EXAMPLES = [
    code
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    if "tensorrt_llm" in code
]


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page(code: str, scripts: Scripts) -> None:
    scripts.run(code)
