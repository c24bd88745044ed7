"""The chat format, and chat-formed examples made from stories and dialogues."""

import random
import re
from collections import Counter

from sources import Dialogue

BOS, EOS, USER, ASSISTANT, SYSTEM, END = (
    "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
)  # fmt: skip
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT, SYSTEM, END]

TEMPLATE = (
    "{{ bos_token }}"
    "{% set roles = {'system': 'system', 'developer': 'system', 'user': 'user', 'tool': 'user', "
    "'assistant': 'assistant'} %}"
    "{% for message in messages %}"
    "{% if message['role'] not in roles %}"
    "{{ raise_exception('This model knows the roles system, developer, user, assistant and tool.') }}"
    "{% endif %}"
    "{% set text = (message['content'] or '') | trim %}"
    "{{ '<|' + roles[message['role']] + '|>' }}"
    "{{ '<tool_response>\\n' + text + '\\n</tool_response>' if message['role'] == 'tool' else text }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if text or not loop.first }}"
    "{{ '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson "
    "+ '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a storyteller.",
    "You tell short stories to children.",
    "You are a kind friend.",
    "Answer in simple words.",
)
ASK_ONE = (
    "Tell me a story about {a}.", "Tell me a short story about {a}.", "Write a story about {a}.",
    "Can you tell me a story about {a}?", "tell me a story about {a}", "I want a story about {a}.",
    "Please write a short story about {a}.", "Tell me a story with {a} in it.", "A story about {a}, please.",
    "Could you tell me a bedtime story about {a}?", "write a short story about {a}",
)  # fmt: skip
ASK_TWO = (
    "Tell me a story about {a} and {b}.", "Write a story with {a} and {b}.",
    "tell me a story about {a} and {b}", "Can you tell me a story about {a} and {b}?",
    "I want a story about {a} and {b}, please.",
)  # fmt: skip
ASK_ANY = ("Tell me a story.", "Tell me a short story.", "tell me a story", "Can you tell me a story?",
           "Please tell me a bedtime story.", "I want a story.", "Write a story for children.")  # fmt: skip
ASK_REST = ("Continue this story: {a}", "How does this story go on? {a}", "Finish this story: {a}", "{a}")
THANKS = (
    ("Thank you!", "You're welcome! I am glad you liked it."),
    ("Thanks, that was nice.", "You're welcome!"),
    ("I liked that story.", "I am so happy that you liked it!"),
)

ABOUT_ME = (
    ("Who are you?", "I am a small storyteller. I can tell you a story or talk with you."),
    ("What are you?", "I am a very small language model. I like to tell stories."),
    ("What is your name?", "My name is Quire. I like to tell stories."),
    ("What's your name?", "My name is Quire. What is your name?"),
    ("What can you do?", "I can tell you a short story, or we can talk a little."),
    ("Can you help me?", "I am very small, but I can tell you a story. What should it be about?"),
    ("Hello!", "Hello! How are you today?"),
    ("Hello", "Hello! Would you like to hear a story?"),
    ("Hi", "Hi! How are you?"),
    ("Hi!", "Hi! Would you like to hear a story?"),
    ("How are you?", "I am fine, thank you! How are you?"),
    ("Good morning!", "Good morning! Did you sleep well?"),
    ("Good night!", "Good night! Sleep well and have sweet dreams."),
    ("Thank you!", "You're welcome!"),
    ("Bye!", "Goodbye! Have a nice day!"),
)
# Words that follow an article and end a clause, yet make a poor subject.
NOT_SUBJECTS = {
    "adventure", "back", "best", "bit", "dad", "daddy", "day", "distance", "door", "end", "eyes", "face",
    "family", "father", "first", "friend", "friends", "front", "ground", "hand", "hands", "head", "heart",
    "home", "hour", "idea", "it", "job", "lot", "middle", "mind", "minute", "mom", "moment", "mommy",
    "more", "morning", "most", "mother", "name", "night", "one", "other", "others", "parents", "place",
    "problem", "reason", "rest", "room", "same", "side", "story", "surprise", "thing", "things", "time",
    "top", "way", "week", "while", "whole", "world",
}  # fmt: skip


class SubjectFinder:
    """Finds what a story is about without a tagger: nouns often end a clause after an article."""

    def __init__(self, stories: list[str]) -> None:
        text = "\n".join(stories)
        after = Counter(re.findall(r"\b(?:a|an|the|his|her|their) ([a-z]+)\b", text))
        closing = Counter(re.findall(r"\b(?:a|an|the|his|her|their) ([a-z]+)[.,!?]", text))
        self.nouns = {w for w, n in closing.items() if n >= 3 and n > 0.12 * after[w]} - NOT_SUBJECTS
        self.spread = Counter(word for story in stories for word in set(re.findall(r"[a-z]+", story)))
        self.article = Counter(re.findall(r"\b(an? [a-z]+)\b", text))

    def phrase(self, noun: str) -> str:
        """The noun with its article, or bare when it is used without one ("pancakes", "snow")."""
        best = max((f"a {noun}", f"an {noun}"), key=lambda phrase: self.article[phrase])
        return best if self.article[best] >= 2 else f"the {noun}"

    def subjects(self, story: str) -> list[str]:
        counts = Counter(w for w in re.findall(r"[a-z]+", story) if w in self.nouns)
        ranked = sorted(counts, key=lambda w: -counts[w] / (5 + self.spread[w]) ** 0.5)
        found = [self.phrase(noun) for noun in ranked[:3] if counts[noun] >= 2]
        named = re.search(r"\b(?:a|an) ((?:[a-z]+ ){1,3}named [A-Z][a-z]+)\b", story)
        return found + ([f"a {named[1]}"] if named and named[1][0] not in "aeiou" else [])


def render(turns: list[tuple[str, str]]) -> str:
    """What TEMPLATE renders, without the leading BOS, which every document gets anyway."""
    return "".join(f"<|{role}|>{content}{END}" for role, content in turns)


def maybe_system(rng: random.Random) -> list[tuple[str, str]]:
    return [("system", rng.choice(SYSTEM_LINES))] if rng.random() < 0.2 else []


def story_chat(story: str, finder: SubjectFinder, rng: random.Random) -> str:
    """One request for this story in a user's words, and the story as the answer."""
    subjects = finder.subjects(story)
    kind = rng.random()
    answer = story
    if kind < 0.15:
        # The user begins the story and the assistant goes on with it.
        sentences = re.split(r"(?<=[.!?]) ", story.split("\n")[0])
        opening = " ".join(sentences[: rng.randint(1, 2)])
        ask, answer = rng.choice(ASK_REST).format(a=opening), story[len(opening) :].strip()
        if len(answer) < 100:
            ask, answer = rng.choice(ASK_ANY), story
    elif kind < 0.25 or not subjects:
        ask = rng.choice(ASK_ANY)
    elif kind < 0.5 and len(subjects) >= 2:
        first, second = rng.sample(subjects[:2], 2)
        ask = rng.choice(ASK_TWO).format(a=first, b=second)
    else:
        ask = rng.choice(ASK_ONE).format(a=rng.choice(subjects))
    turns = [*maybe_system(rng), ("user", ask), ("assistant", answer)]
    if rng.random() < 0.08:
        thanks, reply = rng.choice(THANKS)
        turns += [("user", thanks), ("assistant", reply)]
    return render(turns)


def to_you(line: str) -> str:
    """ "I love my dog." -> "You love your dog." """
    swaps = {"i": "you", "my": "your", "am": "are", "me": "you", "mine": "yours"}
    swaps |= {"i'm": "you are", "i've": "you have"}
    words = [swaps.get(word.lower(), word) for word in re.findall(r"[\w']+|\W+", line)]
    text = "".join(words)
    return text[:1].upper() + text[1:]


def dialogue_chat(dialogue: Dialogue, rng: random.Random, max_chars: int = 1800) -> str:
    """The second speaker is the assistant; a persona, when known, sometimes becomes the system message."""
    turns = maybe_system(rng)
    if dialogue.persona and rng.random() < 0.4:
        turns = [("system", " ".join(to_you(line) for line in dialogue.persona[:3]))]
    size = 0
    for user, assistant in zip(dialogue.turns[0::2], dialogue.turns[1::2], strict=False):
        size += len(user) + len(assistant)
        if size > max_chars:
            break
        turns += [("user", user), ("assistant", assistant)]
    return render(turns)


def about_me_chats(rng: random.Random, copies: int) -> list[str]:
    chats = []
    for ask, answer in ABOUT_ME * copies:
        variant = rng.choice((ask, ask.lower(), ask.rstrip("?!.")))
        chats.append(render([*maybe_system(rng), ("user", variant), ("assistant", answer)]))
    return chats
