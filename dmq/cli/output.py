"""How answers look: JSON with stable keys for programs, aligned columns for people."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dmq.units import format_time

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

_PIPE_COLUMNS = 400  # without a terminal nothing is cut


def show_json(value: object) -> None:
    """Print one JSON value; indented, because people read it too and programs do not mind."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def to_plain(message: Message) -> dict[str, object]:
    """Return a message as JSON values: every field by its name, numbers as numbers, enums as names, bytes in base64.

    A field that can be absent and is, is ``None``; all others are always there.
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
        return known.name if known is not None else value  # of a newer daemon
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print aligned columns; those named in ``numbers`` to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _print(table)


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print one fact per line, names in one column; facts without text are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        if text:
            table.add_row(name, Text(printable(text)))
    _print(table)


def printable(text: str) -> str:
    """Return ``text`` with everything escaped that could move the cursor or recolour the terminal of who reads it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def note(text: str) -> None:
    """Print a line beside the answer, on stderr."""
    typer.echo(f"dmq: {printable(text)}", err=True)


def body_text(body: bytes) -> str:
    """Return a body for people: as text where it is text, in base64 where not."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(body).decode()}"


def when(epoch_ms: int, now_ms: int | None = None) -> str:
    """Return an instant for people, with its distance from ``now_ms``; empty for 0, which means none."""
    if not epoch_ms:
        return ""
    text = format_time(epoch_ms)
    if now_ms is None:
        return text
    away_ms = epoch_ms - now_ms
    return f"{text} (in {about(away_ms)})" if away_ms >= 0 else f"{text} ({about(-away_ms)} ago)"


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


def _print(table: object) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    with console.capture() as captured:
        console.print(table)
    # A table pads its lines to full width, which is noise in a pipe.
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
