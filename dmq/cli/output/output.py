"""Output formats: JSON with stable keys for programs, aligned columns for people."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from dmq.config.units import format_time

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console

_PIPE_COLUMNS = 400  # without a terminal almost nothing is folded
_GAP = 2  # between two columns
_WHOLE_CHARS = 255  # the longest names, ids and handles; a longer word is a body, and folds anywhere
_BODY_COLUMNS = 20
_TEXTS = frozenset({"BODY", "OF"})  # headings of columns with free text, which folds anywhere
_SHORT_COLUMNS = 16  # a cell up to this width does not fold: a relative time, a state


def show_json(value: object) -> None:
    """Print one JSON value, indented for readability."""
    typer.echo(json_text(value))


def json_text(value: object) -> str:
    """Return indented JSON of values and messages. Control characters are escaped, all others are unchanged."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_serializable)
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _serializable(value: Any) -> object:  # noqa: ANN401 - of any class that json does not know
    if not hasattr(value, "DESCRIPTOR"):
        return list(value)
    from broker_adapter.wire.plain import to_plain  # needs an extra, unlike the command itself

    return to_plain(value)


def show_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    details: Sequence[str] = (),
) -> None:
    """Print aligned columns; those named in ``numbers`` are right-aligned.

    A word, such as an id, is never broken, so that it can be copied. A terminal shows no empty columns. If a table is
    too wide for it, the widest columns with several words fold. If that is not enough, the columns in ``details`` are
    left out in that order, and a note names them. A pipe gets all columns.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    columns = terminal_columns()
    widths = _widths(headings, cells, columns)
    kept = list(range(len(headings)))
    left_out: list[str] = []
    if columns is not None and cells:
        shown = [heading for at, heading in enumerate(headings) if any(row[at] for row in cells)]
        for detail in ("", *(each for each in details if each in shown)):
            if detail:
                left_out.append(detail)
            kept = [at for at, heading in enumerate(headings) if heading in shown and heading not in left_out]
            widths = _widths([headings[at] for at in kept], [[row[at] for at in kept] for row in cells], columns)
            if _fits(widths, columns):
                break
        headings, cells = [headings[at] for at in kept], [[row[at] for at in kept] for row in cells]
    _print(headings, cells, widths, [heading in numbers for heading in headings])
    if left_out:
        note(f"too narrow for {', '.join(left_out)}; a wider terminal or -o json has all columns")


def _fits(widths: Sequence[int], columns: int) -> bool:
    return sum(widths) + _GAP * (len(widths) - 1) <= columns


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print one fact per line, with aligned names and unbroken words as in a table; facts without text are left out."""
    cells = [[name, printable(text)] for name, text in facts if text]
    _print(None, cells, _widths(("", ""), cells, terminal_columns(), is_facts=True), [False, False])


def show_each(every: Iterable[Iterable[tuple[str, str]]]) -> None:
    """Print the facts of several objects, with an empty line between two."""
    for number, facts in enumerate(every):
        if number:
            typer.echo()
        show_facts(facts)


def terminal_columns() -> int | None:
    """Return the width of the output terminal; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _widths(
    headings: Sequence[str], cells: Sequence[Sequence[str]], columns: int | None, *, is_facts: bool = False
) -> list[int]:
    """Return the width of each column: that of its widest cell, or less if the terminal is too narrow.

    No column is narrower than its longest word, so the sum may exceed the terminal.
    """
    from rich.cells import cell_len

    room = max((_PIPE_COLUMNS if columns is None else columns) - _GAP * (len(headings) - 1), 0)
    widths: list[int] = []
    least: list[int] = []
    for at, heading in enumerate(headings):
        texts = [heading, *(row[at] for row in cells)]
        widths.append(max(map(cell_len, texts)))
        named = [row[at] for row in cells if not is_facts or row[0] != "body"]
        longest = max((cell_len(word) for text in named for word in text.split()), default=0)
        longest = max(longest, cell_len(heading))
        is_whole = longest <= _WHOLE_CHARS and heading not in _TEXTS
        short = max((min(cell_len(row[at]), _SHORT_COLUMNS) for row in cells), default=0) if not is_facts else 0
        least.append(max(longest, short) if is_whole else min(longest, _BODY_COLUMNS))
    if is_facts:
        least[0] = widths[0]
    # The widest columns of those that can fold become equally wide.
    most = min(max(widths, default=0), room + 1)
    while sum(widths) > room and most > 0:
        most -= 1
        widths = [max(min(width, most), floor) for width, floor in zip(widths, least, strict=True)]
    return widths


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, which could move the cursor or recolour the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def note(text: str) -> None:
    """Print a line to stderr, apart from the answer."""
    typer.echo(f"dmq: {printable(text)}", err=True)


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, such as ``1 retry`` and ``1,000 retries``."""
    return f"1 {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def enum_word(message: Message, field: str) -> str:
    """Return the name of an enum value in lower case; the number of a value of a newer daemon."""
    from broker_adapter.wire.plain import to_plain

    return str(to_plain(message)[field]).lower()


def body_text(body: bytes) -> str:
    """Return a body as text if it is valid text, otherwise in base64."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(body).decode()}"


def when(epoch_ms: int, now_ms: int | None = None) -> str:
    """Return a formatted time, with its distance from ``now_ms``; empty for 0, which means none."""
    if not epoch_ms:
        return ""
    text = format_time(epoch_ms)
    if now_ms is None:
        return text
    away_ms = epoch_ms - now_ms
    return f"{text} (in {about(away_ms)})" if away_ms >= 0 else f"{text} ({about(-away_ms)} ago)"


def distance(epoch_ms: int, now_ms: int) -> str:
    """Return the distance of a time from now for a table, in seconds or larger units; empty for 0, which means none."""
    if not epoch_ms:
        return ""
    away_s = (epoch_ms - now_ms) / 1000
    if abs(away_s) < 1:
        return "now"
    text = about(int(abs(away_s)) * 1000)
    return f"in {text}" if away_s > 0 else f"{text} ago"


def about(duration_ms: float) -> str:
    """Return a duration with two or three significant figures: ``3.2ms``, ``45s``, ``2h 5m``, ``3d 4h``."""
    if duration_ms < 1000:
        return f"{duration_ms:.3g}ms"
    seconds = round(duration_ms / 1000)
    if seconds < 60:
        return f"{duration_ms / 1000:.3g}s"
    for unit, unit_s, part, part_s in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= unit_s:
            rest = seconds % unit_s // part_s
            return f"{seconds // unit_s}{unit}" + (f" {rest}{part}" if rest else "")
    raise AssertionError


def _print(
    headings: Sequence[str] | None, cells: Sequence[Sequence[str]], widths: Sequence[int], are_numbers: Sequence[bool]
) -> None:
    """Print rows after headings, which are bold; without headings, the first column is."""
    from rich.cells import cell_len
    from rich.console import Console

    console = Console()
    is_styled = console.is_terminal and not console.is_dumb_terminal
    lines: list[str] = []
    for number, row in enumerate([headings, *cells] if headings is not None else cells):
        columns = [_folded(console, cell.rstrip(), width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=""):
            line = []
            for at, (text, width) in enumerate(zip(parts, widths, strict=True)):
                is_bold = is_styled and text and (not number if headings is not None else not at)
                shown, space = typer.style(text, bold=True) if is_bold else text, " " * (width - cell_len(text))
                line.append(space + shown if are_numbers[at] else shown + space)
            lines.append((" " * _GAP).join(line).rstrip())
    typer.echo("\n".join(lines))


def _folded(console: Console, text: str, width: int) -> list[str]:
    from rich.cells import cell_len
    from rich.text import Text

    if cell_len(text) <= width:
        return [text]
    return [line.plain.rstrip() for line in Text(text).wrap(console, max(width, 1), overflow="fold")]
