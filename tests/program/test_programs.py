"""Programs in the engine: equal to the same calls one by one, shared blocks, sessions, and what ends them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from quire.errors import ProgramError, RequestError, SessionExpiredError
from quire.params import StructuredOutputsParams
from quire.program import calls, sessions
from quire.program.lane import Lane
from quire.program.sessions import SECONDS
from quire.program.tasks import Tasks, Turn
from quire.program.texts import Cuts, Encoder
from quire.text.tokenizer import Tokenizer
from quire.types import Request
from tests.shared import DATA

STORY = "Once upon a time, there was a little girl named Lily. She had a dog and a cat. " * 12
GREEDY = {"temperature": 0}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def gen(name: str | None = None, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"type": "gen", "max_tokens": max_tokens, **named, **more}


def forked(count: int) -> list[dict[str, Any]]:
    """Branches that go on in ways of their own, and their join."""
    branches = [[text(f" Child {i} said:"), gen("said", 6, ignore_eos=True)] for i in range(count)]
    return [{"type": "fork", "branches": branches}, {"type": "join"}]


def role(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "role", "role": name, "steps": list(steps)}


def run(llm: LLM, steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The last event, with the others under "events"."""
    *events, last = llm.run_program({"steps": steps, "sampling": GREEDY, **more})
    assert last["event"] == "done"
    return {**last, "events": events}


def alone(llm: LLM, prompt: str, max_tokens: int = 8, **more: Any) -> str:
    params = SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **more})
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=16, num_gpu_blocks_override=400) as llm:
        yield llm


def nothing_left(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_programs) == (0, 0, 0, 0)
    llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "no cache": {"enable_prefix_caching": False},
    "short of blocks": {"num_gpu_blocks_override": 40, "max_model_len": 512},
    "small steps": {"max_num_batched_tokens": 48},
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_program_equals_its_calls_one_by_one(llm: LLM, plan: str) -> None:
    """Boundaries too: 'wo' and 'nderful' are other tokens together than apart."""
    other = llm if plan == "plain" else LLM(max_num_seqs=16, **PLANS[plan])
    steps = [
        text(STORY + "It was a wo"),
        gen("a", 6),
        text("nderful da"),
        {
            "type": "fork",
            "branches": [
                [text(f"y {word}"), gen("b", 5), text("ing"), gen("c", 5)] for word in ("sun", "sad")
            ],
        },
        {"type": "join", "mode": "concate_and_append"},
        gen("d", 9, stop=[" the", "."]),
        gen("e", 6, regex="[0-9]{3} x"),
        gen("f", 5, seed=3, temperature=1.0),
        {"type": "select", "name": "g", "choices": [" hap", " happy", " happily ever after", "s"]},
        gen("h", 4),
    ]
    result = run(other, steps)
    whole = STORY + "It was a wo"
    values = {"a": alone(llm, whole, 6)}
    whole += values["a"] + "nderful da"
    parts = []
    for word in ("sun", "sad"):
        part = whole + f"y {word}"
        part += alone(llm, part, 5) + "ing"
        parts.append(part + alone(llm, part, 5))
    whole += "".join(part[len(whole) :] for part in parts)
    values["d"] = alone(llm, whole, 9, stop=[" the", "."])
    whole += values["d"]
    values["e"] = alone(llm, whole, 6, structured_outputs=StructuredOutputsParams(regex="[0-9]{3} x"))
    whole += values["e"]
    values["f"] = alone(llm, whole, 5, seed=3, temperature=1.0)
    whole += values["f"]
    values["g"] = chosen(llm, whole, [" hap", " happy", " happily ever after", "s"])
    whole += values["g"]
    values["h"] = alone(llm, whole, 4)
    assert result["variables"] == values
    assert result["text"] == whole + values["h"]
    nothing_left(other)


def chosen(llm: LLM, prompt: str, choices: list[str]) -> str:
    """The choice with the best mean log-probability, by SGLang's rule, from prompt log-probabilities alone."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    start, means = len(tokenizer.encode(prompt)) - 1, []
    for choice in choices:
        tokens = tokenizer.encode(prompt + choice)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        rows = list(zip(tokens, output.prompt_logprobs or [], strict=True))[start:]
        if prompt.endswith(tokenizer.token_bytes(tokens[start]).decode()):
            del rows[0]
        means.append(sum(row[token].logprob for token, row in rows if row) / len(rows))
    return choices[means.index(max(means))]


def test_samples_and_log_probabilities(llm: LLM) -> None:
    step = gen("a", 6, n=3, temperature=1.0, seed=5, return_logprob=True, top_logprobs_num=2)
    result = run(llm, [text("Once upon"), step, text("!"), {"type": "insert", "name": "a", "index": 2}])
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=2)
    (output,) = llm.generate("Once upon", params, use_tqdm=False)
    values = [sample.text for sample in output.outputs]
    assert result["variables"] == {"a": values}
    assert result["text"] == f"Once upon{values[0]}!{values[2]}"
    meta = result["events"][0]["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == output.outputs[0].token_ids
    assert len(meta["output_top_logprobs"][0]) == 2
    assert meta["completion_tokens"] == sum(len(sample.token_ids) for sample in output.outputs)


def watch(llm: LLM, work: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of `work`, the most blocks in use, and the prompt tokens that were computed."""
    core: EngineCore = llm._core
    most = 0

    def see(seconds: float, prompts: float) -> None:
        nonlocal most
        most = max(most, core.scheduler.stats().num_used_blocks)

    llm.reset_prefix_cache()
    before = llm.stats()
    core.on_step = see
    try:
        result = work()
    finally:
        core.on_step = None
    after = llm.stats()
    fresh = (after.prefix_queries - before.prefix_queries) - (after.prefix_hits - before.prefix_hits)
    return result, most, fresh


def test_forks_share_blocks_and_compute_the_text_once(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    story = len(tokenizer.encode(STORY))
    _, most, fresh = watch(llm, lambda: run(llm, [text(STORY), *forked(8)]))
    prompts = [STORY + f" Child {i} said:" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    blocks = -(-(story + 13) // 16)
    assert most <= blocks + 8 * 2
    assert 8 * blocks > 3 * most
    assert fresh < story + 8 * 16
    _, apart, computed = watch(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    print(f"blocks: {most} forked, {apart} as eight requests; prompt tokens computed: {fresh}, {computed}")
    nothing_left(llm)


def test_conditions_repeats_and_chosen_branches(llm: LLM) -> None:
    count = {"type": "repeat", "times": 5, "steps": [text(" ha"), gen("last", 2, regex=" [0-9]")]}
    result = run(llm, [text("Laugh:"), {**count, "until": {"variable": "last", "less_than": 10}}])
    assert result["text"].count(" ha") == 1
    result = run(llm, [text("Laugh:"), {**count, "until": {"variable": "last", "greater_than": 10}}])
    assert result["text"].count(" ha") == 5
    for word, wanted in (("yes", "good"), ("no", "bad")):
        steps = [
            text("Say"),
            gen("answer", 4, regex=f" {word}"),
            {
                "type": "if",
                "condition": {"variable": "answer", "one_of": ["yes", "sure"]},
                "then": [text(" good")],
                "otherwise": [text(" bad")],
            },
        ]
        assert run(llm, steps)["text"] == f"Say {word} {wanted}"
    fork = {"type": "fork", "name": "f", "branches": [[text(f" {i}"), gen("x", 2)] for i in range(3)]}
    pick = [gen("pick", 2, regex="1"), {"type": "join", "fork": "f", "mode": "branch", "branch": "pick"}]
    result = run(llm, [text("Count"), fork, *pick, gen("y", 3)])
    one = "Count 1" + alone(llm, "Count 1", 2)
    assert result["text"] == one + alone(llm, one, 3)


def test_a_branch_may_wait_for_a_variable_of_another(llm: LLM) -> None:
    late = [text(" B"), {"type": "insert", "name": "x", "lane": "fork.0"}, gen("y", 3)]
    result = run(llm, [text("A"), {"type": "fork", "branches": [[gen("x", 9)], late]}, {"type": "join"}])
    x = alone(llm, "A", 9)
    assert result["variables"] == {"x": [x], "y": [alone(llm, f"A B{x}", 3)]}


def test_roles_take_the_models_own_frames(llm: LLM) -> None:
    result = run(llm, [role("user", text("Hi")), role("assistant", gen("a", 20))])
    (answer,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=20))
    assert result["variables"]["a"] == answer.outputs[0].text
    assert result["text"] == f"<|user|>Hi<|end|><|assistant|>{answer.outputs[0].text}<|end|>"


def test_sessions_go_on_where_they_stopped(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first = run(llm, [text(STORY), gen("a", 8)], keep=True)
    assert llm.stats().num_sessions == 1
    assert llm.stats().num_kept_blocks > 10
    second = run(llm, [text(" And"), gen("b", 8)], session=first["session"], keep=True)
    usage = second["events"][0]["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 8
    assert second["session"] == first["session"]
    fork = {"type": "fork", "name": "f", "branches": [[gen("c", 3)], []]}
    run(llm, [fork], session=first["session"], keep=True)
    lanes = {"f.0": [text("!"), gen("d", 3)], "f.1": [gen("c", 2)]}
    *events, last = llm.run_program(
        {"lanes": lanes, "sampling": GREEDY, "session": first["session"], "keep": False}
    )
    ends = {(event["lane"], event["name"]): event["value"] for event in events}
    whole = STORY + first["variables"]["a"] + " And" + second["variables"]["b"]
    assert ends["f.1", "c"] == alone(llm, whole, 2)
    assert ends["f.0", "d"] == alone(llm, whole + alone(llm, whole, 3) + "!", 3)
    assert last["session"] is None
    nothing_left(llm)
    assert llm.stats().num_sessions == 0
    with pytest.raises(SessionExpiredError, match="this session does not exist"):
        run(llm, [gen()], session=first["session"])


def test_sessions_are_bounded_in_time_and_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pool = llm._core.host._interpret.sessions  # type: ignore[union-attr]
    monkeypatch.setattr(pool, "_clock", lambda: now)
    one = run(llm, [text(STORY), gen("a", 4)], keep=True)
    now = SECONDS / 2
    other = run(llm, [text("B" + STORY), gen("a", 4)], keep=True)
    assert llm.stats().num_sessions == 2
    now = SECONDS + 1
    assert llm.stats().num_sessions == 1
    with pytest.raises(SessionExpiredError):
        run(llm, [gen()], session=one["session"])
    llm.end_session(other["session"])
    kept = [run(llm, [text(f"{i} {STORY}"), gen("a", 4)], keep=True) for i in range(15)]
    stats = llm.stats()
    assert stats.num_kept_blocks <= stats.num_blocks // 2
    assert stats.num_sessions == 15
    # Running requests take the rest: the sessions lose blocks and answer the same.
    llm.generate([{"prompt_token_ids": [i + 5] * 900} for i in range(6)], SamplingParams(max_tokens=60))
    assert llm.stats().num_kept_blocks < stats.num_kept_blocks
    result = run(llm, [gen("b", 5)], session=kept[3]["session"])
    assert result["variables"]["b"] == alone(llm, kept[3]["text"], 5)
    for i, one in enumerate(kept):
        if i != 3:
            llm.end_session(one["session"])
    nothing_left(llm)


def test_the_owner_with_most_sessions_makes_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 8)
    kept: list[str] = []

    class Core:
        def keep(self, key: str, request: Request, tokens: list[int]) -> int:
            kept.append(key)
            return len(tokens)

        def let_go(self, key: str) -> None:
            kept.remove(key)

    pool = sessions.Sessions(Core(), lambda: 0.0)  # type: ignore[arg-type]

    def put(name: str, owner: str, size: int = 10) -> None:
        request = Request(id=name, tokens=[1], sampling=SamplingParams(), seed=0, max_tokens=1, owner=owner)
        pool.put(name, {"": Lane(text="x" * size)}, request, {"": [1]})

    put("modest", "b")
    for i in range(280):
        put(f"greedy {i}", "a")
    assert len(pool) == len(kept) == 8
    put("modest 2", "b")
    assert [name for name in ("modest", "modest 2", "greedy 272", "greedy 273") if pool.take(name)] == [
        "modest",
        "modest 2",
    ]
    put("large", "b", sessions.MAX_CHARACTERS)
    assert pool.take("large") is None
    assert pool.take("greedy 279") is not None


@pytest.mark.parametrize("at_words", [True, False])
def test_a_turn_bounds_the_text_that_programs_tokenize(
    at_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many choices and lanes: by a clock that runs by the characters that are tokenized between steps."""
    llm = LLM(max_num_seqs=16)
    run(llm, [text("Once"), gen("a", 1)])  # loads the tokenizer
    host: Any = llm._core.host
    turns: list[int] = [0]
    monkeypatch.setattr(host._turn, "_clock", lambda: sum(turns) * 1e-6)
    monkeypatch.setattr(host._texts.cuts, "at_words", at_words)
    begin, encode = host._turn.begin, Encoder.encode

    def begun() -> None:
        turns.append(0)
        begin()

    def counted(encoder: Encoder, given: str) -> list[int]:
        turns[-1] += len(given)
        return encode(encoder, given)

    begun()
    monkeypatch.setattr(host._turn, "begin", begun)
    monkeypatch.setattr(Encoder, "encode", counted)
    choices = [f"{i} " + "the dog ran home and " * 30 for i in range(24)]
    branch = [text("b "), {"type": "select", "name": "v", "choices": choices}]
    result = run(
        llm,
        [text("a"), {"type": "fork", "name": "f", "branches": [branch] * 8}, {"type": "join", "fork": "f"}],
    )
    assert len(result["variables"]["v"]) == 8
    assert sum(turns) > 8 * 24 * 600
    assert max(turns) <= 5000 + max(map(len, choices)) + 20
    nothing_left(llm)


def test_steps_of_a_program_run_over_several_turns() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    turn = Turn(clock)
    tasks, done, turns = Tasks(turn), [], 0

    async def count(number: int) -> None:
        for _ in range(10):
            await tasks
        done.append(number)

    for number in range(20):
        tasks.start(count(number))
    while tasks.ready:
        turn.begin()
        tasks.run()
        turns += 1
    assert sorted(done) == list(range(20))
    assert turns > 40


@pytest.mark.parametrize("sentence", ["The dog ran home. ", "日本語。"])
def test_long_texts_are_tokenized_beside_the_steps(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is, others go on; the results are the same, and leaving meanwhile leaves nothing."""
    llm = LLM(max_num_seqs=16)
    long = (sentence * 3000)[:12_000]
    short = llm.stream("Once", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    with pytest.raises(ProgramError, match="this model's maximum context length is 1024"):
        run(llm, [text(long), gen("a", 5)])
    assert len(list(short)[-1].outputs[0].token_ids) == 50
    steps = [text(sentence * 20), gen("a", 5), *forked(4), gen("b", 5)]
    wanted = run(llm, steps)
    monkeypatch.setattr(calls, "MAX_CHARACTERS", 3)
    assert run(llm, steps)["variables"] == wanted["variables"]
    leaving = llm.run_program({"steps": [text(long), gen("a", 5)], "stream": True})
    assert next(leaving)["event"] == "start"
    leaving.close()  # type: ignore[attr-defined]
    nothing_left(llm)


def test_leaving_ends_a_program(llm: LLM) -> None:
    steps = [text("A"), {"type": "fork", "branches": [[gen("x", 900, ignore_eos=True)] for _ in range(4)]}]
    events = llm.run_program({"steps": steps, "sampling": GREEDY, "stream": True})
    seen = [next(events) for _ in range(5)]  # four begin before one says something
    assert {event["event"] for event in seen} == {"start", "text"}
    events.close()  # type: ignore[attr-defined]
    assert llm.stats().num_programs == 0
    nothing_left(llm)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([text("a " * 1500), gen()], "the text has 1502 tokens|the text has 1501 tokens"),
        (
            [text("A"), {"type": "fork", "branches": [
                [{"type": "insert", "name": "x", "lane": "fork.1"}, gen("y")],
                [{"type": "insert", "name": "y", "lane": "fork.0"}, gen("x")],
            ]}],
            "the steps wait for each other",
        ),
        (
            [text("A"), {"type": "fork", "branches": [[]]}, {"type": "join", "mode": "branch", "branch": 3}],
            "branch must be from 0 to 0",
        ),
        ([text("A"), {"type": "insert", "name": "x", "lane": "nowhere"}], "there is no lane 'nowhere'"),
        ([text("x" * 20_000)], "would have more than 16384 characters"),
        ([text("A"), gen("x", n=2), {"type": "insert", "name": "x"}], "is a list: give the index"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_done(llm: LLM, steps: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        run(llm, steps)
    nothing_left(llm)


def deep(levels: int) -> dict[str, Any]:
    step = text("x")
    for _ in range(levels):
        step = {"type": "repeat", "times": 1, "steps": [step]}
    return step


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ({"steps": []}, "the program has no steps"),
        ({"steps": [{"type": "dance"}]}, "Invalid value 'dance'"),
        ({"steps": [gen(max_tokens=0)]}, "gen 0: max_tokens must be an integer >= 1"),
        ({"steps": [gen("x", regex="(")]}, "regex"),
        ({"steps": [gen("x", regex="a", json_schema="{}")]}, "give regex or json_schema, not both"),
        ({"steps": [gen("x", n=999)]}, "<= 64"),
        ({"steps": [{"type": "select", "choices": []}]}, "length >= 1"),
        ({"steps": [{"type": "insert", "name": "x"}]}, "no step before assigns variable 'x'"),
        ({"steps": [{"type": "join"}]}, "join: no fork 'fork' before it"),
        ({"steps": [deep(9)]}, "nested more than 8 deep"),
        ({"steps": [{"type": "repeat", "times": 1024, "steps": [text("x")] * 9}]}, "may run 9217 steps"),
        ({"steps": [{"type": "repeat", "times": 1000, "steps": [gen("x", 2000)]}]}, "may run 2000000 tokens"),
        ({"steps": [{"type": "fork", "branches": [[text("x")]] * 64}] * 5}, "may run 321 lanes"),
        ({"steps": [text("x")], "lanes": {"f.0": []}}, "lanes are for a session"),
        ({"steps": [text("x")], "sampling": {"heat": 3}}, "unknown field `heat`"),
        ({"steps": [role("user", role("user"))]}, "inside another"),
        ({"steps": [{"type": "separate_reasoning", "model_type": "nobody", "steps": []}]}, "'nobody' is unknown"),
    ],
)  # fmt: skip
def test_programs_that_are_refused_before_they_start(llm: LLM, program: dict[str, Any], words: str) -> None:
    before = llm.stats().num_steps
    with pytest.raises(RequestError, match=words):
        list(llm.run_program(program))
    assert llm.stats().num_steps == before


def tokenizers() -> list[Path]:
    """Every tokenizer that this checkout can find, and the shipped one."""
    shipped = ASSETS / SHIPPED_MODEL
    return [shipped, *sorted({path.parent for path in DATA.glob("*/**/tokenizer.json")})[:12]]


@pytest.mark.parametrize("path", tokenizers(), ids=lambda path: path.name)
def test_texts_that_grow_have_the_tokens_of_the_whole(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    rng = random.Random(1)
    parts = [
        "word",
        " the",
        " a",
        "\n",
        " ",
        "  ",
        "'s",
        " don't",
        "é",
        "日本",
        "1",
        " 42",
        "<",
        "|end|>",
        ".",
        " Big",
        "x y",
    ]
    cuts = Cuts(tokenizer)
    for number in range(30):
        encoder, text = Encoder(cuts), ""
        for _ in range(12):
            text += "".join(rng.choices(parts, k=rng.randint(1, 9)))
            if number % 2 and (part := encoder.long_part(text, 16)) is not None:
                encoder.learn(part, tokenizer.encode(part))
            assert encoder.encode(text) == tokenizer.encode(text)
            assert encoder.encode(text + " x") == tokenizer.encode(text + " x")
