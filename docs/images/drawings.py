"""Draws how the scheduler works, from the scheduler itself: `python docs/images/drawings.py` writes them.

A block table, continuous batching step by step, chunked prefill beside a stream, and the radix tree of the prefix
cache; each for a light and for a dark page. The same code makes the same bytes, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from quire.config import SchedulerConfig
from quire.params import SamplingParams
from quire.sched import Scheduler
from quire.types import Request, ScheduledBatch, StepOutput

FOLDER = Path(__file__).parent / "drawings"
BLOCK = 4  # tokens
THEMES = {
    "light": {"ink": "#2b2622", "dim": "#857c72", "line": "#cfc6ba", "none": "#f3efe9"},
    "dark": {"ink": "#ece5dc", "dim": "#9c9389", "line": "#544c45", "none": "#2a2623"},
}
COLORS = ("#b5523b", "#c8993f", "#4f7f78", "#6f6aa8", "#8a9a4b", "#a8627f", "#5b86b0")


class Machine:
    """A scheduler whose model says the numbers 1, 2, 3, ... after each prompt."""

    def __init__(self, slots: int, budget: int = 64, caching: bool = False) -> None:
        config = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(config, 24, BLOCK, 64, caching)
        self.names: dict[int, str] = {}  # request by slot

    def add(self, name: str, prompt: list[int], outputs: int) -> None:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        self.scheduler.add(Request(id=name, tokens=prompt, sampling=params, seed=0, max_tokens=outputs))

    def step(self) -> ScheduledBatch | None:
        """Plan a step and take in its tokens."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        for slot in batch.freed:
            self.names.pop(slot, None)
        self.names |= {new.slot: new.request.id for new in batch.new}
        tokens = {
            seq.slot: [(seq.start + len(seq.tokens)) % 90 + 10] for seq in batch.seqs if seq.wants_logits
        }
        self.scheduler.update(batch, StepOutput(batch.step, tokens))
        return batch


class Page:
    """An SVG of rectangles, lines and words."""

    def __init__(self, theme: dict[str, str], title: str, width: int, height: int) -> None:
        self.theme, self.parts = theme, list[str]()
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="12" role="img">'
            f"<title>{escape(title)}</title>"
        )

    def words(self, x: float, y: float, text: object, kind: str = "ink", anchor: str = "start") -> None:
        fill = self.theme.get(kind, kind)
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}">{escape(str(text))}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: object = "") -> None:
        line, color = self.theme["line"], self.theme.get(fill, fill)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}" stroke="{line}"/>'
        )
        if text != "":
            self.words(x + width / 2, y + height / 2 + 4, text, "#fff" if fill in COLORS else "ink", "middle")

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = "dim") -> None:
        fill = self.theme.get(color, color)
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{fill}" fill="none"/>')

    def text(self) -> str:
        return "\n".join([self.head, *self.parts, "</svg>"]) + "\n"


def block_table(theme: dict[str, str]) -> str:
    """Two sequences with a common beginning: tables of logical blocks, and the pool that they point into."""
    machine, shared = Machine(4, caching=True), [11, 12, 13, 14, 15, 16, 17, 18]
    machine.add("A", [*shared, 21, 22], 7)
    machine.step()
    machine.add("B", [*shared, 31, 32, 33], 4)
    for _ in range(3):
        machine.step()
    tables = machine.scheduler.block_tables
    page = Page(theme, "Block tables of two sequences that share a prefix", 620, 250)
    used = sorted({block for table in tables for block in table})
    slots = max(12, max(used) + 1)
    at = {block: 20 + 48 * block for block in range(slots)}
    page.words(20, 205, f"the pool: {slots} of its blocks, {BLOCK} tokens each", "dim")
    for block in range(slots):
        owners = [i for i, table in enumerate(tables) if block in table]
        fill = "none" if not owners else COLORS[2] if len(owners) > 1 else COLORS[owners[0] * 3]
        page.box(at[block], 160, 42, 28, fill, block)
    for i, table in enumerate(tables):
        x = 60 + 300 * i
        page.words(x - 34, 58, "AB"[i], COLORS[i * 3])
        for k, block in enumerate(table):
            page.box(
                x + 52 * k,
                40,
                46,
                28,
                COLORS[2] if block in tables[1 - i] else COLORS[i * 3],
                f"{k} → {block}",
            )
            page.line(x + 52 * k + 23, 68, at[block] + 21, 160, COLORS[i * 3])
    page.words(20, 24, "block tables: which block of the pool holds which tokens of a sequence", "dim")
    page.words(20, 236, "The first blocks hold the same tokens, so both tables point at them.", "ink")
    return page.text()


def batching(theme: dict[str, str]) -> str:
    """Each step's slots, as requests come and go: a free slot goes to the next request at once."""
    machine, outputs = Machine(4), {"A": 4, "B": 2, "C": 3, "D": 6, "E": 5, "F": 3, "G": 4}
    for name, count in outputs.items():
        machine.add(name, [1], count)
    steps: list[dict[int, str]] = []
    while (batch := machine.step()) is not None:
        steps.append({seq.slot: machine.names[seq.slot] for seq in batch.seqs})
    page = Page(theme, "Continuous batching step by step", 110 + 46 * len(steps), 230)
    page.words(16, 24, "seven requests, four slots; each column is a step", "dim")
    for slot in range(4):
        page.words(16, 63 + 38 * slot, f"slot {slot}", "dim")
        for number, owners in enumerate(steps):
            name = owners.get(slot, "")
            fill = COLORS[list(outputs).index(name)] if name else "none"
            page.box(76 + 46 * number, 44 + 38 * slot, 42, 30, fill, name)
    for number in range(len(steps)):
        page.words(97 + 46 * number, 214, number + 1, "dim", "middle")
    return page.text()


def chunked(theme: dict[str, str]) -> str:
    """A long prompt in chunks beside a stream, which gets a token in each step."""
    machine, shown = Machine(4, budget=8), []
    machine.add("stream", [1, 2], 9)
    machine.step()
    machine.add("prompt", list(range(10, 34)), 3)
    while (batch := machine.step()) is not None and len(shown) < 7:
        shown.append(
            {machine.names[seq.slot]: (seq.start, len(seq.tokens), seq.wants_logits) for seq in batch.seqs}
        )
    page = Page(theme, "Chunked prefill beside a stream", 610, 180)
    page.words(16, 24, "a prompt of 24 tokens arrives while a stream runs; a step has 8 tokens", "dim")
    for row, name in enumerate(("stream", "prompt")):
        page.words(16, 64 + 46 * row, name, COLORS[row * 2])
    for number, step in enumerate(shown):
        x = 76 + 75 * number
        for row, name in enumerate(("stream", "prompt")):
            if name not in step:
                continue
            start, count, answers = step[name]
            kind = COLORS[row * 2] if answers else COLORS[row * 2 + 1]
            text = "token" if count == 1 else f"{start}–{start + count - 1}"
            page.box(x, 44 + 46 * row, 70, 32, kind, text)
        page.words(x + 35, 144, f"step {number + 2}", "dim", "middle")
    page.words(
        16,
        168,
        "The stream gets a token in every step; the prompt's last chunk gives its first one.",
        "ink",
    )
    return page.text()


def radix(theme: dict[str, str]) -> str:
    """The tree of the prefix cache after three chats that begin alike."""
    machine, system = Machine(4, caching=True), [11, 12, 13, 14, 15, 16]
    for name, prompt in (
        ("A", [*system, 21, 22, 23]),
        ("B", [*system, 31, 32]),
        ("C", [*system, 31, 32, 41, 42, 43]),
    ):
        machine.add(name, prompt, 3)
        while machine.step() is not None:
            pass
    root = machine.scheduler._tables.prefix.root
    page = Page(theme, "The radix tree of the prefix cache", 560, 170)
    page.words(
        16,
        24,
        "after three requests, one after another: numbers are tokens, blocks hold the last of them",
        "dim",
    )
    rows = iter(range(20))

    def draw(node: object, x: float) -> float:
        """Draw a node right of its parent, its children below each other; return its row's height."""
        children = list(node.children.values())  # type: ignore[attr-defined]
        tokens = [token for token in node.edge if isinstance(token, int)]  # type: ignore[attr-defined]
        width = 12 + 21 * max(1, len(tokens))
        ys = [draw(child, x + width + 26) for child in children]
        y = ys[0] if ys else 44 + 42 * next(rows)
        value = node.value  # type: ignore[attr-defined]
        text = " ".join(map(str, tokens)) or "root"
        page.box(x, y, width, 26, COLORS[4] if value is not None else "none", text)
        if value is not None:
            page.words(x + width / 2, y + 38, f"block {value}", "dim", "middle")
        for child_y in ys:
            page.line(x + width, y + 13, x + width + 26, child_y + 13)
        return y

    draw(root, 16)
    return page.text()


DRAWINGS = {"block-table": block_table, "batching": batching, "chunked-prefill": chunked, "radix-tree": radix}


def drawings() -> Iterator[tuple[str, str]]:
    """Make each drawing for each theme: file names and texts."""
    for name, draw in DRAWINGS.items():
        for theme, colors in THEMES.items():
            yield f"{name}-{theme}.svg", draw(colors)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in drawings():
        (FOLDER / file).write_text(text)
