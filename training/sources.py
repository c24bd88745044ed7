"""Read, clean and split the text that the model learns from.

Only sources whose licence lets a model trained on them be given away for any use are read here:
public domain and CC0, CC-BY, Apache-2.0, MIT, and CDLA-Sharing (which leaves the results of a
computation free). Left out: CC-BY-NC stories, stories without a licence, and the CC-BY-SA dialogues.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Standard Ebooks volumes that children read; the rest of that set is harder English than the model can use.
CHILDREN = (
    "a-a-milne", "aesop", "anna-sewell", "beatrix-potter", "e-nesbit", "eleanor-h-porter", "frances-hodgson",
    "george-macdonald", "hugh-lofting", "j-m-barrie", "jacob-grimm", "kenneth-grahame", "l-frank-baum",
    "l-m-montgomery", "lewis-carroll", "louisa-may", "mark-twain", "oscar-wilde", "robert-louis", "rudyard",
)  # fmt: skip
OLD_TALES = ("aesop", "jacob-grimm", "oscar-wilde", "george-macdonald")
OPEN_LICENCES = ("CC-BY", "Public Domain", "public-domain text (repo has no licence file)")
ASCII = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...",
                       "\u00a0": " ", "\u2060": "", "\ufeff": "", "\u200a": "", "æ": "ae"})  # fmt: skip


@dataclass
class Split:
    """Documents of one source. `test` is never trained on nor looked at before the final evaluation."""

    train: list[str] = field(default_factory=list)
    val: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)


def clean(text: str) -> str:
    """Plain quotes and dashes, and no trailing spaces: a small vocabulary has no room for variants."""
    # UTF-8 that was once read as Windows-1252; the last entry also serves the closing quote.
    for broken, right in (("â€œ", '"'), ("â€™", "'"), ("â€˜", "'"), ("â€¦", "..."), ("â€“", "-"),
                          ("â€”", " - "), ("â€\u009d", '"'), ("â€", '"')):  # fmt: skip
        text = text.replace(broken, right)
    text = text.translate(ASCII)
    text = re.sub(r"(?:[ \t]|\\r)+", " ", text)  # some dialogues carry the two characters backslash and r
    return re.sub(r" ?\n ?", "\n", text).strip()


def bucket(text: str) -> int:
    """A number in 0..99 that depends on the text alone, so that the split survives reordering."""
    return zlib.crc32(text.encode()) % 100


def shingles(text: str, size: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def is_recased(story: str) -> bool:
    """True for the stories whose capitals were lost and guessed again: speech begins in lower case."""
    return bool(re.search(r'(^|[,.:!?] |\n)"[a-z]', story)) or bool(re.search(r"\w'[STMDRLV]", story))


def repair_case(story: str) -> str:
    """Mend what can be mended in a re-cased story: the start of speech, clitics, names after 'named'."""
    story = re.sub(r'((?:^|[,.:!?] |\n)")([a-z])', lambda m: m[1] + m[2].upper(), story)
    story = re.sub(r"(\w')([A-Z]{1,2})\b", lambda m: m[1] + m[2].lower(), story)
    for name in set(re.findall(r"\bnamed ([a-z]{3,})\b", story)) - {"the", "after", "her", "his", "him"}:
        story = re.sub(rf"\b{name}\b", name.capitalize(), story)
    return story


def tiny_stories(data: Path) -> Split:
    """7,422 short stories. Training stories that nearly repeat a held-out one are dropped."""
    raw = (data / "text-tinystories/tinystories_union.txt").read_text(encoding="utf-8")
    stories = [clean(story) for story in raw.split("<|endoftext|>")]
    split = Split()
    rest: list[str] = []
    for story in dict.fromkeys(stories):
        if len(story) < 200 or not story.isascii() or story[-1] not in '.!?"':
            continue  # fragments that were cut off would teach the model to stop in mid-sentence
        if is_recased(story):
            rest.append(repair_case(story))
        elif bucket(story) < 6:
            split.test.append(story)
        elif bucket(story) < 9:
            split.val.append(story)
        else:
            rest.append(story)
    held_out: set[tuple[str, ...]] = set()
    for story in split.test + split.val:
        held_out |= shingles(story)
    for story in rest:
        own = shingles(story)
        if len(own & held_out) < 0.2 * len(own):
            split.train.append(story)
    return split


def open_stories(data: Path) -> Split:
    split = Split()
    with (data / "text-childrens-openstories/openstories_en.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            text = clean(row["text"])
            if row["license"] not in OPEN_LICENCES or len(text) < 200:
                continue
            (split.test if bucket(text) < 6 else split.train).append(text)
    return split


def attributions(data: Path) -> Iterator[str]:
    """One line for each CC-BY story in the training set."""
    publishers = {
        "african-storybook": "African Storybook (africanstorybook.org)",
        "pratham-books": "Pratham Books StoryWeaver (storyweaver.org.in)",
    }
    with (data / "text-childrens-openstories/openstories_en.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["license"] == "CC-BY":
                yield f"{clean(row['title'])} - {publishers[row['src']]}, {row['id']}"


def fairy_tales(data: Path) -> Split:
    split = Split()
    for part in ("train", "val", "test"):
        with (data / f"text-fairytaleqa/{part}.jsonl").open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                # The lines of these tales are broken by hand; a blank line ends a paragraph.
                paragraphs = re.split(r"\n\s*\n", row["story"])
                split.train.append("\n".join(clean(p).replace("\n", " ") for p in paragraphs))
    return split


def books(data: Path, authors: tuple[str, ...] = CHILDREN) -> Split:
    """Books in pieces of about 3,000 characters, cut at paragraphs."""
    split = Split()
    with gzip.open(data / "text-standardebooks/standardebooks.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["id"].split("/")[1].startswith(authors):
                split.train += pieces(clean(row["text"]), 3000)
    return split


def pieces(text: str, size: int) -> Iterator[str]:
    piece: list[str] = []
    for paragraph in text.split("\n"):
        piece.append(paragraph)
        if sum(map(len, piece)) > size:
            yield "\n".join(piece)
            piece = []
    if piece:
        yield "\n".join(piece)


def teacher_stories(run: Path) -> Split:
    """What teacher.py wrote."""
    split = Split()
    for path in sorted(run.glob("teacher-*.txt")):
        stories = path.read_text(encoding="utf-8").split("<|endoftext|>")
        split.train += [clean(s) for s in stories if len(s) > 200 and s.isascii()]
    return split


def shakespeare(data: Path) -> Split:
    text = clean((data / "text-tinyshakespeare/input.txt").read_text(encoding="utf-8"))
    parts = list(pieces(text, 1500))
    return Split(train=parts[: -len(parts) // 20], test=parts[-len(parts) // 20 :])


def old_tales(data: Path) -> Split:
    parts = [p for p in books(data, OLD_TALES).train if len(p) > 500]
    return Split(train=[p for p in parts if bucket(p) >= 5], test=[p for p in parts if bucket(p) < 5])


@dataclass
class Dialogue:
    turns: list[str]
    persona: list[str] = field(default_factory=list)  # of the second speaker, who becomes the assistant


def dialogues(data: Path) -> Iterator[Dialogue]:
    """Small talk between two people, and coffee orders (without their tool calls)."""
    path = data / "chat-topical-persona/synthetic_persona_validtest.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            turns = [clean(turn) for turn in row["turns"]]
            if not any("[" in turn for turn in turns):  # unfilled places such as "[user 1 name]"
                yield Dialogue(turns, [clean(line) for line in row["personas"][1]])
    with gzip.open(data / "chat-taskmaster4/tm4.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            spoken = [m for m in row["messages"] if m["role"] != "tool" and m.get("content")]
            roles = [m["role"] for m in spoken]
            if len(spoken) >= 2 and roles == ["user", "assistant"] * (len(spoken) // 2):
                yield Dialogue([clean(m["content"]) for m in spoken])
