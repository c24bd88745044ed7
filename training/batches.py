"""Training rows: which text, in what shares, at which point of the run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Phase:
    """From `begin` (a fraction of the run) on, rows of `length` tokens are drawn from these sources."""

    begin: float
    length: int
    shares: dict[str, float]


# General English first, stories and dialogue last. Long rows are dear (attention), so only the end has them;
# they teach the positions up to the context length.
PHASES = (
    Phase(0.0, 256, {"books": 0.14, "fairy-tales": 0.06, "open-stories": 0.05, "teacher": 0.30,
                     "stories": 0.35, "talk": 0.10}),
    Phase(0.2, 256, {"books": 0.03, "fairy-tales": 0.03, "open-stories": 0.04, "teacher": 0.10,
                     "stories": 0.46, "story-chat": 0.18, "talk": 0.16}),
    Phase(0.97, 1024, {"open-stories": 0.05, "fairy-tales": 0.03, "stories": 0.40, "story-chat": 0.30,
                      "talk": 0.22}),
)  # fmt: skip


class Source:
    """One token file. Draws have no state, so a resumed run sees what the uninterrupted one would have."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.tokens = file["tokens"].astype(np.int64)
            self.starts = file["starts"]

    def row(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """`length` + 1 tokens; they begin at the beginning of a document unless that is far away."""
        position = int(rng.integers(len(self.tokens) - length - 1))
        start = int(self.starts[np.searchsorted(self.starts, position, side="right") - 1])
        if position - start < length // 2:
            position = start
        return self.tokens[position : position + length + 1]

    def rows(self, length: int, limit: int) -> Tensor:
        """The first rows of the file one after the other, for validation."""
        count = min(limit, (len(self.tokens) - 1) // length)
        begins = range(0, count * length, length)
        return torch.tensor(np.stack([self.tokens[begin : begin + length + 1] for begin in begins]))


class Batches:
    def __init__(self, folder: Path, phases: tuple[Phase, ...], seed: int) -> None:
        names = {name for phase in phases for name in phase.shares}
        self.sources = {name: Source(folder / f"{name}.npz") for name in sorted(names)}
        self.phases = phases
        self.seed = seed

    def phase(self, progress: float) -> Phase:
        return [phase for phase in self.phases if phase.begin <= progress][-1]

    def batch(self, step: int, progress: float, rank: int, tokens: int) -> Tensor:
        """Rows that hold about `tokens` tokens together."""
        phase = self.phase(progress)
        rng = np.random.default_rng([self.seed, step, rank])
        names = rng.choice(list(phase.shares), size=tokens // phase.length, p=list(phase.shares.values()))
        return torch.tensor(np.stack([self.sources[name].row(phase.length, rng) for name in names]))
