"""Who may go on with what cannot be undone."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from dmq.cli.bulk.confirm import confirm
from dmq.cli.output.errors import CommandFailed, ExitCode


class Stream(io.StringIO):
    """A stream that is a terminal, or not."""

    def __init__(self, text: str = "", *, is_terminal: bool = True) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(("can_answer", "can_see"), [(False, True), (True, False), (False, False)])
def test_a_producer_that_cannot_see_or_answer_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, can_answer: bool, can_see: bool
) -> None:
    """It would wait for ever; with a yes it needs nobody."""
    monkeypatch.setattr(sys, "stdin", Stream("y\n", is_terminal=can_answer))
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal=can_see))
    with pytest.raises(
        CommandFailed, match="all \x07 go; there is no terminal for a confirmation; use --yes"
    ) as caught:
        confirm("all \x07 go", yes=False)
    assert caught.value.exit_code is ExitCode.USAGE
    confirm("all go", yes=True)


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("YES \n", True), ("n\n", False), ("yeah\n", False)])
def test_only_a_yes_is_a_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, goes_on: bool
) -> None:
    """The question is on stderr: stdout is for the answer of the command."""
    monkeypatch.setattr(sys, "stdin", Stream(answer))
    monkeypatch.setattr("dmq.cli.bulk.confirm.is_terminal", lambda: True)
    if goes_on:
        confirm("all go", yes=False)
    else:
        with pytest.raises(typer.Abort):
            confirm("all go", yes=False)
    assert capsys.readouterr() == ("", "dmq: all go. Continue? [y/N] ")
