"""Write samples without choosing among them: one for each seed.

python training/samples.py --model src/quire/assets/quire-stories --seeds 10
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

CHATS = (
    [{"role": "user", "content": "Tell me a story about a dog."}],
    [{"role": "user", "content": "Hi! How are you?"}],
    [{"role": "user", "content": "What do you like to do for fun?"}],
)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def write(ids: torch.Tensor, seed: int) -> str:
        set_seed(seed)
        out = model.generate(ids, max_new_tokens=args.max_new_tokens)[0, ids.shape[1] :]
        ended = out[-1].item() in model.generation_config.eos_token_id
        return tokenizer.decode(out, skip_special_tokens=True) + ("" if ended else " [cut off]")

    for seed in range(args.seeds):
        text = write(tokenizer(args.prompt, return_tensors="pt").input_ids, seed)
        print(f"**Seed {seed}.** {args.prompt}{text}\n", flush=True)
    for seed, messages in enumerate(CHATS):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        print(f"> {messages[-1]['content']}\n\n{write(ids, seed)}\n", flush=True)


if __name__ == "__main__":
    main()
