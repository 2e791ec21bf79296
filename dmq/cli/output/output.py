"""Output formats: JSON with stable keys for programs, aligned columns for people."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dmq.config.units import format_time

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

_PIPE_COLUMNS = 400  # without a terminal almost nothing is folded
_GAP = 2  # between two columns
_WHOLE_CHARS = 255  # the longest names, ids and handles; a longer word is a body, and folds anywhere
_BODY_COLUMNS = 20
_TEXTS = frozenset({"BODY", "OF"})  # headings of columns with free text, which folds anywhere
_SHORT_COLUMNS = 16  # a cell up to this width does not fold: a relative time, a state
_LINES = 25  # rich ignores a width without a height on a dumb terminal


def show_json(value: object) -> None:
    """Print one JSON value, indented for readability."""
    typer.echo(json_text(value))


def json_text(value: object) -> str:
    """Return indented JSON of values and messages. Control characters are escaped, all others are unchanged."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_serializable)
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _serializable(value: Any) -> object:  # noqa: ANN401 - of any class that json does not know
    return to_plain(value) if hasattr(value, "DESCRIPTOR") else list(value)


def to_plain(message: Message) -> dict[str, object]:
    """Return a message as JSON values: every field by its name, numbers as numbers, enums as names, bytes in base64.

    An absent optional field is None; all other fields are always present.
    """
    fields: Iterable[Any] = message.DESCRIPTOR.fields
    return {field.name: _plain_field(message, field) for field in fields}


def _plain_field(message: Message, field: FieldDescriptor) -> object:
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return dict(sorted(value.items()))
        return [_plain(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value, field)


def _plain(value: Any, field: FieldDescriptor) -> object:  # noqa: ANN401 - whatever a field holds
    if field.message_type is not None:
        return to_plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        if known is None:
            return value  # of a newer daemon
        return known.name if not known.name.endswith("_UNSPECIFIED") else None
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


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
    from rich.cells import cell_len

    lines = _rendered(headings, (), widths, are_numbers) if headings is not None else []
    folding: list[Sequence[str]] = []  # consecutive rows for one table of rich, because a table costs 2 ms
    for row in cells:
        row = [cell.rstrip() for cell in row]  # noqa: PLW2901 - as rich does
        lengths = list(map(cell_len, row))
        if headings is None or any(length > width for length, width in zip(lengths, widths, strict=True)):
            folding.append(row)
            continue
        if folding:
            lines += _rendered(None, folding, widths, are_numbers)
            folding = []
        spaces = (" " * (width - length) for length, width in zip(lengths, widths, strict=True))
        fitting = [
            space + cell if is_number else cell + space
            for cell, space, is_number in zip(row, spaces, are_numbers, strict=True)
        ]
        lines.append((" " * _GAP).join(fitting))
    lines += _rendered(None, folding, widths, are_numbers, are_facts=headings is None) if folding else []
    # A table pads its lines to full width, which is noise in a pipe.
    typer.echo("\n".join(line.rstrip() for line in lines))


def _rendered(
    headings: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    are_numbers: Sequence[bool],
    *,
    are_facts: bool = False,
) -> list[str]:
    """Return the lines of headings, or of rows with cells that may fold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=headings is not None)
    for at, width in enumerate(widths):
        table.add_column(
            headings[at] if headings is not None else "",
            justify="right" if are_numbers[at] else "left",
            style="bold" if are_facts and not at else "",
            overflow="fold",
            width=max(width, 1),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False, width=max(sum(widths) + _GAP * len(widths), 1), height=_LINES)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()
