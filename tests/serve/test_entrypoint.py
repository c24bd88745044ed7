"""The alias module says the same as `quire serve`."""

from __future__ import annotations

import pytest

from quire.entrypoints.openai.api_server import as_serve, main


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (["--model", "m", "--port", "1"], ["serve", "m", "--port", "1"]),
        (["--port", "1", "--model=m"], ["serve", "m", "--port", "1"]),
        (["--port", "1"], ["serve", "--port", "1"]),
        (["--model"], ["serve"]),
    ],
)
def test_the_model_becomes_the_first_argument(argv: list[str], same: list[str]) -> None:
    assert as_serve(argv) == same


def test_the_alias_takes_serve_options_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert "--served-model-name" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["--model", "m", "--no-such-flag"])
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as wrong:
        main(["--model", "m", "--port", "700000"])
    assert wrong.value.code
