"""Train the model, or a draft that imitates it.

    python train.py --run RUN --name main --steps 2000
    python train.py --run RUN --name draft --size draft --distill RUN/main.pt --steps 800

Two processes with one thread each share every step (their gradients are averaged): on a machine where
other programs compete for the cores, that is faster than two threads that wait for each other after every
operation. SIGTERM saves a checkpoint and stops; the same command resumes. With the schedule used here
(warm-up, constant, linear decay) the number of steps may be changed until the decay begins.
"""

import argparse
import ctypes
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import PHASES, Batches, Source
from muon import Muon
from torch import Tensor
from torch.nn import functional as F

from model import SIZES, Llama

MICRO_TOKENS = 2048  # logits of one forward pass stay near the cache
WARMUP_STEPS = 60


@dataclass
class Options:
    run: Path
    name: str
    size: str
    steps: int
    batch_tokens: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    decay_from: float
    distill: Path | None
    compile: bool
    workers: int
    seed: int = 1


class Stopper:
    """Remembers that SIGTERM came, so that the step in hand can be finished."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks: asking the kernel for fresh pages each time costs half the speed."""
    mmap_max, trim_threshold, top_pad = -4, -1, -2
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 256 << 20)


def rate(step: int, options: Options) -> float:
    """The learning rate's factor: warm-up, constant, linear decay to a twentieth."""
    progress = step / options.steps
    if progress > options.decay_from:
        return max(0.05, (1 - progress) / (1 - options.decay_from))
    return min(1.0, (step + 1) / min(WARMUP_STEPS, options.steps // 10 + 1))


def build_optimizers(model: Llama, options: Options) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, options.adam_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    return [Muon(matrices, options.muon_lr, weight_decay=options.weight_decay), adam]


def load_model(path: Path, weights: str = "average") -> Llama:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = Llama(SIZES[saved["size"]])
    model.load_state_dict(saved[weights])
    return model


@torch.no_grad()
def start_embedding(model: Llama, teacher: Llama) -> None:
    """Give a draft the teacher's embedding, projected to its main directions: most of a draft is embedding."""
    known = teacher.model.embed_tokens.weight
    directions = torch.linalg.svd(known, full_matrices=False)[2]
    projected = known @ directions[: model.config.dim].T
    model.model.embed_tokens.weight.copy_(projected * 0.04 / projected.std())  # small: it is the head too


class Trainer:
    def __init__(self, rank: int, options: Options) -> None:
        self.rank, self.options = rank, options
        torch.manual_seed(options.seed)  # every worker starts from the same weights
        self.model = Llama(SIZES[options.size])
        self.teacher = load_model(options.distill) if options.distill else None
        if self.teacher:
            start_embedding(self.model, self.teacher)
        self.optimizers = build_optimizers(self.model, options)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.batches = Batches(options.run / "tokens", PHASES, options.seed)
        self.validation = Source(options.run / "tokens/stories-val.npz").rows(512, 64)
        self.path = options.run / f"{options.name}.pt"
        self.step = 0
        self.loss = torch.compile(self._loss, dynamic=False) if options.compile else self._loss
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.average = saved["average"]
        self.step = saved["step"]
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        if self.rank != 0:
            return
        saved: dict[str, Any] = {
            "size": self.options.size,
            "step": self.step,
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        part = self.path.with_suffix(".part")
        torch.save(saved, part)
        part.replace(self.path)  # a kill in between leaves the old checkpoint whole

    def _loss(self, rows: Tensor, teacher_logits: Tensor | None) -> Tensor:
        logits = self.model(rows[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows[:, 1:].flatten())
        if teacher_logits is None:
            return loss
        # Imitating the whole distribution is what makes a draft's guesses agree with the model.
        target = teacher_logits.flatten(0, 1).log_softmax(-1)
        apart = F.kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True)
        return 0.2 * loss + 0.8 * apart

    def train_step(self) -> float:
        o = self.options
        rows = self.batches.batch(self.step, self.step / o.steps, self.rank, o.batch_tokens // o.workers)
        parts = rows.split(max(1, MICRO_TOKENS // (rows.shape[1] - 1)))
        total = 0.0
        for part in parts:
            with torch.no_grad():
                teacher_logits = self.teacher(part[:, :-1]) if self.teacher else None
            loss = self.loss(part, teacher_logits) / len(parts)
            loss.backward()
            total += loss.item()
        self._share_gradients()
        factor = rate(self.step, o)
        for optimizer, base in zip(self.optimizers, (o.muon_lr, o.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        keep = min(0.99, self.step / (self.step + 20))
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1 - keep)
        return total

    def _share_gradients(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.options.workers
        flat *= min(1.0, 1.0 / (flat.norm().item() + 1e-6))  # clipped to norm 1
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def validate(self) -> float:
        """Loss per token on held-out stories, with the averaged weights."""
        current = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.load_state_dict(self.average)
        total = torch.zeros(2)
        for rows in self.validation[self.rank :: self.options.workers].split(4):
            logits = self.model(rows[:, :-1]).flatten(0, 1)
            total[0] += F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
            total[1] += rows[:, 1:].numel()
        self.model.load_state_dict(current)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def should_stop(self, stopper: Stopper) -> bool:
        """The workers must agree, or one would wait for the other forever."""
        asked = torch.tensor(float(stopper.asked))
        dist.all_reduce(asked)
        return asked.item() > 0

    def fit(self) -> None:
        stopper = Stopper()
        seen, start, saved_at = 0, time.monotonic(), time.monotonic()
        recent = 0.0
        while self.step < self.options.steps:
            loss = self.train_step()
            seen += self.options.batch_tokens
            recent = loss if recent == 0 else 0.95 * recent + 0.05 * loss
            if self.rank == 0 and self.step % 20 == 0:
                speed = seen / (time.monotonic() - start)
                print(f"step {self.step} loss {recent:.3f} {speed:.0f} tokens/s", flush=True)
            if self.step % 200 == 0 or self.step == self.options.steps:
                loss = self.validate()
                if self.rank == 0:
                    print(f"step {self.step} validation {loss:.4f}", flush=True)
            stopping = self.should_stop(stopper)
            if stopping or time.monotonic() - saved_at > 180:
                self.save()
                saved_at = time.monotonic()
            if stopping:
                return
        self.save()


def work(rank: int, options: Options) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    meeting = options.run / f"{options.name}.meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.workers)
    Trainer(rank, options).fit()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", default="main")
    parser.add_argument("--size", choices=sorted(SIZES), default="main")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--decay-from", type=float, default=0.55)
    parser.add_argument("--distill", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    options = Options(**vars(parser.parse_args()))
    options.run = options.run.resolve()
    (options.run / f"{options.name}.meeting").unlink(missing_ok=True)
    spawn = mp.get_context("spawn")
    others = [spawn.Process(target=work, args=(rank, options)) for rank in range(1, options.workers)]
    for process in others:
        process.start()
    pids = [mp.current_process().pid, *(process.pid for process in others)]
    (options.run / "train.pid").write_text(" ".join(map(str, pids)) + "\n")
    work(0, options)
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
