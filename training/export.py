"""Write a training checkpoint as an ordinary Hugging Face checkpoint directory.

python export.py --run RUN --name main --out ../src/quire/assets/quire-stories
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from chat import ASSISTANT, BOS, END, EOS, SYSTEM, TEMPLATE, USER
from safetensors.torch import save_file
from tokenizers import Tokenizer
from train import load_model

from model import Config, Llama


def model_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)],
        "torch_dtype": "bfloat16",
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.token_to_id(BOS),
        # A plain story ends with EOS, a turn of a chat with END.
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, END],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Llama, tokenizer_path: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    shutil.copyfile(tokenizer_path, out / "tokenizer.json")
    write_json(out / "config.json", model_config(model.config, tokenizer))
    write_json(out / "generation_config.json", generation_config(tokenizer))
    write_json(out / "tokenizer_config.json", tokenizer_config(model.config.context))
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner alone
    print(f"{out}: {sum(t.numel() for t in weights.values()):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", default="main")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", choices=("model", "average"), default="average")
    args = parser.parse_args()
    export(load_model(args.run / f"{args.name}.pt", args.weights), args.run / "tokenizer.json", args.out)


if __name__ == "__main__":
    main()
