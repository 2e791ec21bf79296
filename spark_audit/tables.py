"""Reader of the trail: the listing of its files, and tables with the columns of docs/reference/trail.md.

A trail may be anywhere the engine can read: DuckDB reads local folders, Spark any Hadoop file system (``file:``,
``hdfs:``, ``s3a:``). The trail is listed once. All later reads name their files, so a file added in the meantime has
no effect.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from spark_audit.engines import Relation, TableEngine
from spark_audit.schema import ENTRIES, EVENTS, PROGRESS, QUEUES, ROWS, TRAIL_VERSION, Fields, TrailError

_EVENTS_PATH = re.compile(r"(events/cell=([^/]+)/date=([0-9-]{10})/hour=([0-9]{2})/([0-9]{20})-([0-9]{20})\.parquet)")
_MANIFEST_PATH = re.compile(r"manifest/cell=([^/]+)/[0-9-]{10}\.jsonl")
_SNAPSHOT_PATH = re.compile(r"snapshots/cell=([^/]+)/([0-9]{20})/manifest\.json")
_CELL_PATH = re.compile(r"cells/([^/]+)\.json")
_RETIRED_PATH = re.compile(r"retired/([^/]+)\.json")
_NUMBERS_END = 2**63

ROLES = ("daemon", "spool")
MISSING = "it is not there"
CONTENTS: Final[Mapping[str, Fields]] = {"entries": ENTRIES, "progress": PROGRESS, "queues": QUEUES}  # of a snapshot


class EventFile(NamedTuple):
    """Existing file of events."""

    path: str  # relative to the trail
    cell: str
    first: int
    last: int
    bytes: int


class ManifestLine(NamedTuple):
    """Entry of a manifest about a file."""

    path: str
    cell: str
    first: int
    last: int
    rows: int
    bytes: int
    sha256: str
    previous: str | None  # recorded digest of the line before; None in lines of earlier builds
    digest: str
    first_at_ms: int | None = None  # of its first event; None in a line without it
    last_at_ms: int | None = None


class TrailCell(NamedTuple):
    """Contents of ``cells/<cell>.json``; without a readable file ``role`` is empty and ``retired`` is 0.

    ``retired`` is limited to a plausible value: see ``_held_to``. ``doubt`` is the reason why it is lower than in the
    file.
    """

    cell: str
    role: str
    retired: int
    doubt: str = ""


class Snapshot(NamedTuple):
    """Snapshot: cell and sequence from its path, the rest from its head.

    ``doubts`` are contradictions to its head: other values of cell and sequence, and names of files.
    """

    cell: str
    sequence: int
    taken_ms: int
    path: str  # relative to the trail
    rows: dict[str, int]  # by table
    sha256: dict[str, str]
    doubts: tuple[str, ...] = ()


class Damage(NamedTuple):
    """File or manifest line that breaks the format of docs/reference/trail.md. The audit does not use it."""

    cell: str
    path: str
    why: str


class Retirement(NamedTuple):
    """Contents of ``retired/<cell>.json``: an operator declared the cell gone after the event ``last_sequence``.

    ``is_void``: the cell has later events, so it is not gone.
    """

    cell: str
    last_sequence: int
    is_void: bool


class TrailListing(NamedTuple):
    """All files and records of a trail."""

    root: str
    files: tuple[EventFile, ...]
    lines: tuple[ManifestLine, ...]
    cells: dict[str, TrailCell]
    snapshots: tuple[Snapshot, ...]
    damages: tuple[Damage, ...] = ()
    retirements: tuple[Retirement, ...] = ()

    def url(self, path: str) -> str:
        """Return the URL of a path of the trail."""
        return f"{self.root}/{path}"


class _Damaged(Exception):
    """Part of the trail that cannot be used; the message gives the reason."""


def list_trail(engine: TableEngine, trail: str) -> TrailListing:
    """List a trail. Raise ``TrailError`` if there is none; damaged files and lines are listed separately."""
    root, paths = engine.walk(trail)
    files, damages = _event_files(paths)
    if not files and not any(path.startswith(("cells/", "events/")) for path, _ in paths):
        raise TrailError(f"{trail}: no trail found (neither events nor cells)")
    patterns = (_MANIFEST_PATH, _SNAPSHOT_PATH, _CELL_PATH, _RETIRED_PATH)
    wanted = [path for path, _ in paths if any(each.fullmatch(path) for each in patterns)]
    texts = engine.texts(root, wanted)
    lines: list[ManifestLine] = []
    cells = {name: TrailCell(name, "", 0) for path in wanted if path.startswith("cells/") for name in [_cell_in(path)]}
    snapshots: list[Snapshot] = []
    retired: dict[str, int] = {}
    sizes = dict(paths)
    for path in wanted:
        try:
            if path not in texts:
                raise _Damaged("it cannot be read")
            if path.startswith("cells/"):
                cells[_cell_in(path)] = _cell(_cell_in(path), texts[path])
            elif path.startswith("retired/"):
                retired[_cell_in(path)] = _number(_of_cell(_cell_in(path), texts[path]), "last_sequence")
            elif path.startswith("manifest/"):
                damages += _read_manifest(path, texts[path], lines)
            else:
                snapshots.append(_snapshot(path, texts[path], sizes))
        except _Damaged as why:
            damages.append(Damage(_cell_in(path), path, str(why)))
    for name in {each.cell for found in (files, lines, snapshots) for each in found} - cells.keys():
        cells[name] = TrailCell(name, "", 0)
        damages.append(Damage(name, f"cells/{name}.json", MISSING))
    for name, cell in cells.items():
        if cell.retired:
            own = [file for file in files if file.cell == name]
            cells[name] = _held_to(cell, own, [line for line in lines if line.cell == name])
    return TrailListing(
        root,
        tuple(sorted(files)),
        tuple(sorted(set(lines), key=lambda line: (line.cell, line.first, line.last, line.path))),
        cells,
        tuple(sorted(snapshots)),
        tuple(sorted(damages)),
        tuple(Retirement(cell, last, _last_of(cell, files, lines) > last) for cell, last in sorted(retired.items())),
    )


class UnknownCell(TrailError):
    """The cell does not exist in the trail."""


def retire_cell(engine: TableEngine, trail: str, cell: str) -> None:
    """Record in the trail that a cell is gone. Raise ``UnknownCell`` if the trail does not contain it."""
    listing = list_trail(engine, trail)
    if cell not in listing.cells:
        raise UnknownCell(f"the trail has no cell {cell!r}; it has: {', '.join(sorted(listing.cells)) or 'none'}")
    last = _last_of(cell, listing.files, listing.lines)
    if Retirement(cell, last, is_void=False) in listing.retirements:
        return
    url = listing.url(f"retired/{cell}.json")
    engine.remove(url)
    engine.write_text(url, json.dumps({"version": TRAIL_VERSION, "cell": cell, "last_sequence": last}) + "\n")


def _last_of(cell: str, files: Iterable[EventFile], lines: Iterable[ManifestLine]) -> int:
    return max([0, *(each.last for found in (files, lines) for each in found if each.cell == cell)])


def _cell_in(path: str) -> str:
    """Return the cell in a path; empty if there is none."""
    found = re.search(r"/cell=([^/]+)/", path) or _CELL_PATH.fullmatch(path) or _RETIRED_PATH.fullmatch(path)
    return unquote(found[1]) if found is not None else ""


def _event_files(paths: Iterable[tuple[str, int]]) -> tuple[list[EventFile], list[Damage]]:
    files: list[EventFile] = []
    damages: list[Damage] = []
    for path, size in paths:
        try:
            if path.startswith("events/") and path.endswith(".parquet"):
                files.append(_event_file(path, size))
        except _Damaged as why:
            damages.append(Damage(_cell_in(path), path, str(why)))
    return files, damages


def _event_file(path: str, size: int) -> EventFile:
    match = _EVENTS_PATH.fullmatch(path)
    if match is None or not 0 < int(match[5]) <= int(match[6]) < _NUMBERS_END:
        raise _Damaged("its name is not that of an event file")
    return EventFile(path, unquote(match[2]), int(match[5]), int(match[6]), size)


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"not JSON: {ascii(str(error))[:200]}") from error
    if not isinstance(value, dict) or value.get("version") != TRAIL_VERSION:
        raise _Damaged(f"not of version {TRAIL_VERSION}: {ascii(text)[:80]}")
    return value


def _number(value: Mapping[str, Any], name: str) -> int:
    found = value.get(name)
    if type(found) is not int or not 0 <= found < _NUMBERS_END:
        raise _Damaged(f"{name} is {ascii(found)[:80]}, not an integer of 63 bits")
    return found


def _text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise _Damaged(f"{name} is {ascii(found)[:80]}, not text")
    return found


def _read_manifest(path: str, text: str, lines: list[ManifestLine]) -> list[Damage]:
    """Append the lines of a manifest to ``lines``, and return the damaged ones."""
    damages: list[Damage] = []
    cell = _cell_in(path)
    whole, _, _ = text.rpartition("\n")  # a last line without a newline is incomplete
    for number, line in enumerate(whole.split("\n"), start=1):
        try:
            if line:
                lines.append(_manifest_line(cell, line))
        except _Damaged as why:
            damages.append(Damage(cell, f"{path}, line {number}", str(why)))
    return damages


def _manifest_line(cell: str, line: str) -> ManifestLine:
    value = _parse(line)
    first, last, rows = (_number(value, name) for name in ("first_sequence", "last_sequence", "rows"))
    size, path = _number(value, "bytes"), _text(value, "path")
    if (_text(value, "cell"), _cell_in(path)) != (cell, cell):
        raise _Damaged(f"it is of another cell: {ascii(path)[:200]}")
    file = _event_file(path, size)
    if (first, last) != (file.first, file.last):
        raise _Damaged(f"it is of sequences {first} to {last}, and its file of others: {path}")
    previous = _text(value, "previous") if value.get("previous") is not None else None
    digest = hashlib.sha256(line.encode()).hexdigest()
    times = [_number(value, name) if name in value else None for name in ("first_at_ms", "last_at_ms")]
    return ManifestLine(path, cell, first, last, rows, size, _text(value, "sha256"), previous, digest, *times)


def _of_cell(name: str, text: str) -> dict[str, Any]:
    value = _parse(text)
    if value.get("cell") != name:
        raise _Damaged(f"it is of another cell, {ascii(value.get('cell'))[:80]}")
    return value


def _cell(name: str, text: str) -> TrailCell:
    value = _of_cell(name, text)
    if value.get("role") not in ROLES:
        raise _Damaged(f"role is {ascii(value.get('role'))[:80]}, not one of {', '.join(ROLES)}")
    return TrailCell(name, value["role"], _number({"retired_sequence": 0} | value, "retired_sequence"))


def _held_to(cell: TrailCell, files: Sequence[EventFile], lines: Sequence[ManifestLine]) -> TrailCell:
    """Limit ``retired`` to the events that retention can remove: whole dates, the oldest events first, never the
    newest.

    The digest chain does not cover the file of the cell. The daemon writes it before it removes a date. A date with all
    of its files present is therefore not removed yet, and is judged.
    """
    said = cell.retired
    spans = [(each.first, each.last) for each in files] + [(each.first, each.last) for each in lines]
    begins = min((first for first, _ in spans), default=said + 1)
    before_all = min(said, begins - 1)
    if not any(last > said for _, last in spans):
        return cell._replace(retired=before_all, doubt=f"{said:,}, and nothing is there behind it")
    removed = {_date_of(line.path) for line in lines if line.first <= said}
    if halved := removed & {_date_of(line.path) for line in lines if line.last > said}:
        return cell._replace(retired=before_all, doubt=f"{said:,}, which is inside of {min(halved)}")
    there = {file.path for file in files}
    gone = {_date_of(line.path) for line in lines if line.first <= said and line.path not in there}
    begun = [line.last for line in lines if _date_of(line.path) in gone]
    is_left = any(line.first <= said for line in lines)
    return cell._replace(retired=max(begun, default=before_all if is_left else said))


def _date_of(path: str) -> str:
    found = _EVENTS_PATH.fullmatch(path)
    return found[3] if found is not None else ""


def _snapshot(path: str, text: str, sizes: Mapping[str, int]) -> Snapshot:
    match = _SNAPSHOT_PATH.fullmatch(path)
    assert match is not None
    cell, sequence, where = unquote(match[1]), int(match[2]), path.removesuffix("/manifest.json")
    if sequence >= _NUMBERS_END:
        raise _Damaged("its name is not a sequence")
    try:
        value = _parse(text)
        about = value.get("files")
        if not isinstance(about, dict) or not all(isinstance(each, dict) for each in about.values()):
            raise _Damaged("files is missing, or of another type")
        files = {name: (_text(each, "sha256"), _number(each, "bytes")) for name, each in about.items()}
        rows = {name: _number(value, name) for name in CONTENTS}
        said = {"cell": _text(value, "cell"), "sequence": _number(value, "sequence")}
        taken_ms = _number(value, "taken_ms")
    except _Damaged as why:
        return Snapshot(cell, sequence, 0, where, {}, {}, (f"its head cannot be read: {why}",))
    is_its = {"cell": cell, "sequence": sequence}
    doubts = [f"its head is of {name} {ascii(str(said[name]))[1:-1]}" for name in is_its if said[name] != is_its[name]]
    names = sorted({f"{name}.parquet" for name in CONTENTS} | files.keys())
    others = [name for name in names if name not in files or sizes.get(f"{where}/{name}") != files[name][1]]
    doubts += [ascii(name)[1:-1] for name in others]
    sha256 = {name: sha256 for name, (sha256, _) in files.items()}
    return Snapshot(cell, sequence, taken_ms, where, rows, sha256, tuple(doubts))


# --- tables -----------------------------------------------------------------------------------------------------------


def read_events(engine: TableEngine, listing: TrailListing, files: Iterable[EventFile]) -> Relation:
    """Return the rows of some files with their cell (columns of ``ROWS``), and the URL and name of their file."""
    chosen = list(files)
    rows = engine.read_parquet([listing.url(file.path) for file in chosen], EVENTS, [file.cell for file in chosen])
    return rows.select(*(name for name, _ in ROWS), "path", "file_name")


def read_contents(engine: TableEngine, listing: TrailListing, snapshots: Sequence[Snapshot], name: str) -> Relation:
    """Return one table of some snapshots (one of ``CONTENTS``), with ``cell``."""
    fields = CONTENTS[name]
    urls = [listing.url(f"{each.path}/{name}.parquet") for each in snapshots]
    return engine.read_parquet(urls, fields, [each.cell for each in snapshots]).drop("path", "file_name")


def read_back_table(engine: TableEngine, where: str, name: str, fields: Fields) -> Relation:
    """Return one table read back from a cluster; ``where`` is its directory."""
    url = f"{where.rstrip('/')}/{name}.parquet"
    for fault in engine.schema_faults([url], fields).values():
        raise TrailError(f"{url}: {fault}")
    return engine.read_parquet([url], fields, [""]).select(*(each for each, _ in fields))


def read_sums(engine: TableEngine, listing: TrailListing, paths: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files by path, computed where the files are read; empty for an unreadable file."""
    try:
        return dict(zip(paths, engine.sums([listing.url(path) for path in paths]), strict=True))
    except engine.errors:
        if len(paths) == 1:
            return {paths[0]: ""}
        return {path: one for each in paths for path, one in read_sums(engine, listing, [each]).items()}
