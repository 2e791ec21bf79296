"""What people and programs get to see."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from rich.text import Text

from dmq.cli.output.errors import describe, wants_json
from dmq.cli.output.output import about, body_text, distance, printable, show_facts, show_table, when

NOW = 1_700_000_000_000


def test_columns_are_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe a table has no colours, no frame, no trailing spaces, and whole values."""
    show_table(("NAME", "N"), [("x" * 150, "1"), ("y", "1,000")], numbers=("N",))
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first.split(), second.split(), third.split()) == (["NAME", "N"], ["x" * 150, "1"], ["y", "1,000"])
    assert len(second) == len(third)


MESSAGE_ID = "01C0FFEE00C0FFEE000012340000000001"


@pytest.mark.parametrize("columns", [10, 40, 80, 120, None])
def test_a_name_is_whole_on_one_line_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    """It can be copied: an id, a key, a handle. Sentences fold between words, bodies anywhere."""
    monkeypatch.setattr("dmq.cli.output.output.terminal_columns", lambda: columns)
    handle, why, body = "h" * 255, "it was sent twice, and one is enough", "b" * 200
    show_table(("DUE", "MESSAGE ID", "WHY", "N", "BODY"), [(when(NOW), MESSAGE_ID, why, "1,000", body)], numbers=("N",))
    show_facts([("message id", MESSAGE_ID), ("handle", handle), ("deliver at", when(NOW)), ("why", why)])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for whole in (MESSAGE_ID, handle, "1,000"):
        assert any(whole in line.split() for line in lines), printed
    assert printed.count("b") == 200
    assert all(word in printed for word in (*why.split(), "2023-11-14T22:13:20.000Z"))
    assert (len(lines) == 6) == (columns is None)
    assert max(len(line) for line in lines if MESSAGE_ID in line) <= max(columns or 400, 120)


def test_a_terminal_shows_no_empty_column_and_leaves_out_details(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gets all columns. A narrow terminal loses the least important ones, and a note names them."""
    headings = ("STATE", "DUE", "STORED", "MESSAGE ID", "QUEUE", "KEYS", "BYTES")
    rows = [("waiting", "in 2h 30m", "1h 20m ago", MESSAGE_ID, "", "customer-4711", "300")]
    note = "dmq: too narrow for BYTES, STORED; a wider terminal or -o json has all columns\n"
    for columns, gone, noted in ((74, {"QUEUE", "BYTES", "STORED"}, note), (120, {"QUEUE"}, ""), (None, set(), "")):
        monkeypatch.setattr("dmq.cli.output.output.terminal_columns", lambda columns=columns: columns)
        show_table(headings, rows, numbers=("QUEUE", "BYTES"), details=("BYTES", "STORED"))
        printed = capsys.readouterr()
        assert {each for each in headings if each not in printed.out} == gone
        assert printed.err == noted
        assert len(printed.out.splitlines()) == 2
        assert max(map(len, printed.out.splitlines())) <= (columns or 400)


@pytest.mark.parametrize(
    ("away_ms", "text"),
    [
        (0, "now"),
        (-999, "now"),
        (7_050, "in 7s"),
        (-7_950, "7s ago"),
        (5_400_000, "in 1h 30m"),
        (-90_000_000, "1d 1h ago"),
    ],
)
def test_times_in_tables_are_relative_and_short(away_ms: int, text: str) -> None:
    """Whole seconds, two units at most; 0 means there is none."""
    assert distance(NOW + away_ms, NOW) == text
    assert distance(0, NOW) == ""


def test_a_value_wider_than_everything_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    """No character of it is lost."""
    show_table(("NAME", "N"), [("x" * 1000, "1")])
    assert capsys.readouterr().out.count("x") == 1000


def test_markup_and_control_characters_of_messages_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A message cannot recolour, clear or fake the terminal of an operator."""
    show_facts([("body", "[red]x[/red]\x1b[2J\r\nstate queued\u202e"), ("none", "")])
    assert capsys.readouterr().out == "body  [red]x[/red]\\x1b[2J\\r\\nstate queued\\u202e\n"
    assert printable("é 漢") == "é 漢"


def test_bodies_are_text_or_base64() -> None:
    """Whatever is in it."""
    assert body_text("é".encode()) == "é"
    assert body_text(b"\xff\x00") == "base64:/wA="


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0ms"),
        (0.8, "0.8ms"),
        (3.256, "3.26ms"),
        (999, "999ms"),
        (1200, "1.2s"),
        (59_999, "1m"),
        (61_000, "1m 1s"),
        (3_725_000, "1h 2m"),
        (90_000_000, "1d 1h"),
        (8_640_000_000, "100d"),
    ],
)
def test_durations_for_people(duration_ms: float, text: str) -> None:
    """Two parts at most."""
    assert about(duration_ms) == text


def test_instants_for_people() -> None:
    """With the distance from now; zero means there is none."""
    assert when(0, NOW) == ""
    assert when(NOW) == "2023-11-14T22:13:20.000Z"
    assert when(NOW + 5000, NOW).endswith("(in 5s)")
    assert when(NOW - 5000, NOW).endswith("(5s ago)")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "json", "status"], True),
        (["status", "-ojson"], True),
        (["status", "--output=json"], True),
        (["status", "--output", "json"], True),
        (["status", "-o", "table"], False),
        (["msg", "send", "json", "-o"], False),
        ([], False),
    ],
)
def test_json_is_noticed_before_anything_is_parsed(arguments: list[str], expected: bool) -> None:
    """A usage error of a program is for a program, too."""
    assert wants_json(arguments) is expected


def test_errors_for_people_and_for_programs() -> None:
    """Prefixed lines, or one object."""
    assert describe("a\nb", 2, as_json=False) == "dmq: a\ndmq: b"
    assert describe("é", 3, as_json=True) == '{"error": {"kind": "not_found", "exit_code": 3, "message": "é"}}'
    assert '"kind": "failure"' in describe("x", 99, as_json=True)


def test_rows_that_fit_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    """Danger: a table of 4,000 topics took 7 s, nearly all of it in rich, for rows that need no folding."""
    with patch.object(Text, "wrap", autospec=True, side_effect=Text.wrap) as wrapped:
        show_table(("TOPIC", "PENDING"), [(f"orders-{each}", "1,000") for each in range(9)], numbers=("PENDING",))
    assert wrapped.call_count == 0
    lines = ["TOPIC     PENDING", *(f"orders-{each}    1,000" for each in range(9))]
    assert capsys.readouterr().out.splitlines() == lines
