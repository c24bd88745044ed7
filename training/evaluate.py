"""Bits per byte on text that was held out from training, for our models and for stories260K.

    python training/evaluate.py --data ../shared/data --assets src/quire/assets [--out results.json]

Every model reads the same bytes. Each document begins with the model's BOS; a document longer than the
window (512 tokens for every model, the context of stories260K) is read in windows that overlap by half,
and a token counts once, in the window where it has the most context. The end-of-text token is not
counted, since its cost has no bytes. Bits per byte do not depend on the tokenizer, losses per token do.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

WINDOW, STRIDE = 512, 256


@dataclass
class Score:
    model: str
    text: str
    documents: int
    loss_per_token: float
    bytes_per_token: float
    bits_per_byte: float


def held_out(data: Path) -> dict[str, list[str]]:
    """The same split as in training (see sources.py)."""
    sys.path.insert(0, str(Path(__file__).parent))
    import sources  # noqa: PLC0415 - a neighbour of this script, which may be run from anywhere

    return {"TinyStories": sources.tiny_stories(data).test, "Open stories": sources.open_stories(data).test}


@torch.inference_mode()
def document_loss(model: PreTrainedModel, ids: list[int]) -> float:
    """The summed loss in nats of all tokens but the first, which is BOS."""
    total, begin, counted = 0.0, 0, 1
    while True:
        window = torch.tensor([ids[begin : begin + WINDOW]])
        logits = model(window).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
        total += losses[counted - begin - 1 :].sum().item()
        counted = begin + window.shape[1]
        if counted >= len(ids):
            return total
        begin += STRIDE


def evaluate(name: str, directory: Path, texts: dict[str, list[str]]) -> list[Score]:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scores = []
    for text, documents in texts.items():
        loss, tokens, size = 0.0, 0, 0
        for document in documents:
            ids = [tokenizer.bos_token_id, *tokenizer.encode(document, add_special_tokens=False)]
            if tokenizer.decode(ids[1:]).strip() != document.strip():
                raise ValueError(f"{name} does not keep the text: its bits per byte would not be comparable")
            loss += document_loss(model, ids)
            tokens += len(ids) - 1
            size += len(document.encode())
        bits = loss / math.log(2) / size
        scores.append(Score(name, text, len(documents), loss / tokens, size / tokens, bits))
    return scores


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="also write the scores as JSON")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if not (args.data / "text-tinystories").is_dir():
        print(f"skipped: {args.data} has no text-tinystories (the held-out text is not in the repository)")
        return 0
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()  # documents longer than the window are expected here
    logging.disable_progress_bar()
    texts = held_out(args.data)
    models = {
        "quire-stories": args.assets / "quire-stories",
        "quire-stories-draft": args.assets / "quire-stories-draft",
        "stories260K": args.data / "ckpt-stories260K/hf",
    }
    scores: list[Score] = []
    print("| model | held-out text | documents | loss per token | bytes per token | bits per byte |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, directory in models.items():
        if not directory.is_dir():
            print(f"skipped: {directory} is absent")
            continue
        for s in evaluate(name, directory, texts):
            scores.append(s)
            print(f"| {s.model} | {s.text} | {s.documents} | {s.loss_per_token:.4f} "
                  f"| {s.bytes_per_token:.3f} | {s.bits_per_byte:.4f} |", flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps([asdict(s) for s in scores], indent=2) + "\n")
    ours, theirs = (
        [s.bits_per_byte for s in scores if s.model == model and s.text == "TinyStories"]
        for model in ("quire-stories", "stories260K")
    )
    return int(bool(ours and theirs and ours[0] > theirs[0]))


if __name__ == "__main__":
    sys.exit(main())
