"""Owners take turns at the process that compiles constraints."""

from __future__ import annotations

import asyncio

import pytest

from quire.client import grammar_check
from quire.client.grammar_check import GrammarChecker
from quire.client.grammar_worker import Verdict
from quire.config import EngineConfig
from quire.errors import OverloadedError
from quire.params import StructuredOutputsParams
from quire.types import ModelCard


class Checker(GrammarChecker):
    """Compiles a constraint when the test says so, and notes the order."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(), "")
        self.order: list[str] = []
        self.steps = asyncio.Semaphore(0)

    async def _ask(self, params: StructuredOutputsParams, info: ModelCard) -> Verdict:
        await self.steps.acquire()
        assert params.regex is not None
        self.order.append(params.regex)
        return Verdict(params.regex)


CARD: ModelCard = None  # type: ignore[assignment]


def asked(checker: Checker, owner: str, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(checker.check(StructuredOutputsParams(regex=name), CARD, owner))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_user_with_one_constraint_waits_for_one_of_anothers() -> None:
    async def test() -> None:
        checker = Checker()
        tasks = [asked(checker, "many", f"m{i}") for i in range(20)]
        await settle()
        tasks += [asked(checker, "one", "o"), asked(checker, "two", "t")]
        await settle()
        for _ in tasks:
            checker.steps.release()
        assert await asyncio.gather(*tasks) == [*(f"m{i}" for i in range(20)), "o", "t"]
        assert checker.order[:5] == ["m0", "o", "t", "m1", "m2"]

    asyncio.run(test())


def test_a_full_queue_refuses_who_waits_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 4)

    async def test() -> None:
        checker = Checker()
        many = [asked(checker, "many", f"m{i}") for i in range(5)]  # one is compiled, four wait
        await settle()
        with pytest.raises(OverloadedError, match="too many new constraints"):
            await asked(checker, "many", "m5")
        one = asked(checker, "one", "o")
        await settle()
        assert many[4].done()
        for _ in range(5):
            checker.steps.release()
        *kept, newest = await asyncio.gather(*many, return_exceptions=True)
        assert isinstance(newest, OverloadedError)
        assert kept == ["m0", "m1", "m2", "m3"]
        assert await one == "o"

    asyncio.run(test())


def test_callers_that_leave_keep_no_turn() -> None:
    async def test() -> None:
        checker = Checker()
        first, second, third = (asked(checker, "a", name) for name in "123")
        await settle()
        second.cancel()
        await settle()
        checker.steps.release()
        assert await first == "1"  # the turn passes to the third
        third.cancel()
        await settle()
        last = asked(checker, "a", "4")
        checker.steps.release()
        assert await asyncio.wait_for(last, 60) == "4"
        assert checker.order == ["1", "4"]

    asyncio.run(test())
