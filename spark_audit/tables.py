"""Reading the trail: what there is, and tables with the columns that docs/TRAIL.md promises.

A trail may lie wherever the engine can read: DuckDB reads folders of this machine, Spark whatever Hadoop can
(``file:``, ``hdfs:``, ``s3a:``). What there is, is listed once; all later reads name their files, so a file that is
added meanwhile changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from spark_audit.frames.table import Engine, Table
from spark_audit.schema import ENTRIES, EVENTS, PROGRESS, QUEUES, ROWS, TRAIL_VERSION, Fields, TrailError

_EVENTS_PATH = re.compile(r"(events/cell=([^/]+)/date=([0-9-]{10})/hour=([0-9]{2})/([0-9]{20})-([0-9]{20})\.parquet)$")
_MANIFEST_PATH = re.compile(r"manifest/cell=([^/]+)/[0-9-]{10}\.jsonl$")
_SNAPSHOT_PATH = re.compile(r"snapshots/cell=([^/]+)/([0-9]{20})/manifest\.json")

CONTENTS: Final[Mapping[str, Fields]] = {"entries": ENTRIES, "progress": PROGRESS, "queues": QUEUES}  # of a snapshot


class EventFile(NamedTuple):
    """A file of events that is there."""

    path: str  # relative to the trail
    cell: str
    first: int
    last: int
    bytes: int


class ManifestLine(NamedTuple):
    """What a manifest says of a file."""

    path: str
    cell: str
    first: int
    last: int
    rows: int
    bytes: int
    sha256: str
    previous: str | None  # what it says is the digest of the line before it; None in lines of earlier builds
    digest: str


class Cell(NamedTuple):
    """What ``cells/<cell>.json`` says; a cell without that file is taken for a daemon's.

    ``retired`` is held to what is there: see ``_held_to``. ``doubt`` is why less was retired than the file says.
    """

    cell: str
    role: str
    retired: int
    doubt: str = ""


class Snapshot(NamedTuple):
    """A snapshot: cell and sequence by its path, the rest by its head.

    ``doubts`` are what contradicts its head: what it says of cell and sequence, and names of files.
    """

    cell: str
    sequence: int
    taken_ms: int
    path: str  # relative to the trail
    rows: dict[str, int]  # by table
    sha256: dict[str, str]
    doubts: tuple[str, ...] = ()


class Listing(NamedTuple):
    """Everything that is in a trail."""

    root: str
    files: tuple[EventFile, ...]
    lines: tuple[ManifestLine, ...]
    cells: dict[str, Cell]
    snapshots: tuple[Snapshot, ...]

    def url(self, path: str) -> str:
        """Return where a path of the trail lies."""
        return f"{self.root}/{path}"


def list_trail(engine: Engine, trail: str) -> Listing:
    """List a trail. ``TrailError`` when there is none, or a part of it is of another version or unreadable."""
    root, paths = engine.walk(trail)
    files = []
    for path, size in paths:
        if match := _EVENTS_PATH.search(path):
            relative, cell, _, _, first, last = match.groups()
            files.append(EventFile(relative, unquote(cell), int(first), int(last), size))
        elif path.startswith("events/") and path.endswith(".parquet"):
            raise TrailError(f"{trail}: {path} is not named as a file of events is")
    if not files and not any(path.startswith("cells/") for path, _ in paths):
        raise TrailError(f"{trail}: no trail is there (neither events nor cells)")
    wanted = [
        path
        for path, _ in paths
        if _MANIFEST_PATH.search(path) or _SNAPSHOT_PATH.fullmatch(path) or re.fullmatch(r"cells/[^/]+\.json", path)
    ]
    texts = engine.texts(root, wanted)
    lines = [line for path in wanted if path.startswith("manifest/") for line in _manifest(path, texts[path])]
    cells = {cell.cell: cell for path in wanted if path.startswith("cells/") for cell in [_cell(path, texts[path])]}
    sizes = dict(paths)
    snapshots = [_snapshot(path, texts[path], sizes) for path in wanted if path.startswith("snapshots/")]
    for name in {each.cell for found in (files, lines, snapshots) for each in found} - cells.keys():
        cells[name] = Cell(name, "daemon", 0)
    for name, cell in cells.items():
        if cell.retired:
            own = [file for file in files if file.cell == name]
            cells[name] = _held_to(cell, own, [line for line in lines if line.cell == name])
    return Listing(
        root,
        tuple(sorted(files)),
        tuple(sorted(set(lines), key=lambda line: (line.cell, line.first, line.last, line.path))),
        cells,
        tuple(sorted(snapshots)),
    )


def _parse(path: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TrailError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("version") != TRAIL_VERSION:
        raise TrailError(f"{path}: not of version {TRAIL_VERSION}: {text[:80]!r}")
    return value


@contextmanager
def _fields(path: str) -> Iterator[None]:
    """Turn what goes wrong with single fields into an error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrailError(f"{path}: a field is missing or of another type: {error!r}") from error


def _manifest(path: str, text: str) -> Iterator[ManifestLine]:
    whole, _, _ = text.rpartition("\n")  # a last line without its end is not there yet
    for line in filter(None, whole.split("\n")):
        value = _parse(path, line)
        with _fields(path):
            first, last, rows = (int(value[name]) for name in ("first_sequence", "last_sequence", "rows"))
            size, digest = int(value["bytes"]), hashlib.sha256(line.encode()).hexdigest()
            about = (value["path"], value["cell"], first, last, rows, size, value["sha256"])
            yield ManifestLine(*about, value.get("previous"), digest)


def _cell(path: str, text: str) -> Cell:
    value = _parse(path, text)
    with _fields(path):
        if value["role"] not in {"daemon", "spool"}:
            raise TrailError(f"{path}: role {value['role']!r} is not known")
        if value["cell"] != unquote(path.rsplit("/", 1)[1].removesuffix(".json")):
            raise TrailError(f"{path}: it is of another cell, {value['cell']!r}")
        return Cell(value["cell"], value["role"], int(value.get("retired_sequence", 0)))


def _held_to(cell: Cell, files: Sequence[EventFile], lines: Sequence[ManifestLine]) -> Cell:
    """Return what retention can have removed: whole dates, the oldest events first, and never the newest.

    No chain covers what the file of the cell says of it. It says so before it removes a date: one of which every file
    is there is not removed yet, and is judged.
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
    found = _EVENTS_PATH.search(path)
    return found[3] if found is not None else ""


def _snapshot(path: str, text: str, sizes: Mapping[str, int]) -> Snapshot:
    value = _parse(path, text)
    match = _SNAPSHOT_PATH.fullmatch(path)
    assert match is not None
    cell, sequence, where = unquote(match[1]), int(match[2]), path.removesuffix("/manifest.json")
    with _fields(path):
        files = {name: (str(each["sha256"]), int(each["bytes"])) for name, each in value["files"].items()}
        rows = {name: int(value[name]) for name in CONTENTS}
        said = {"cell": value["cell"], "sequence": int(value["sequence"])}
        taken_ms = int(value["taken_ms"])
    is_its = {"cell": cell, "sequence": sequence}
    doubts = [f"its head is of {name} {said[name]}" for name in is_its if said[name] != is_its[name]]
    names = sorted({f"{name}.parquet" for name in CONTENTS} | files.keys())
    doubts += [name for name in names if name not in files or sizes.get(f"{where}/{name}") != files[name][1]]
    sha256 = {name: sha256 for name, (sha256, _) in files.items()}
    return Snapshot(cell, sequence, taken_ms, where, rows, sha256, tuple(doubts))


# --- tables -----------------------------------------------------------------------------------------------------------


def read_events(engine: Engine, listing: Listing, files: Iterable[EventFile]) -> Table:
    """Return the rows of some files with their cell (columns of ``ROWS``), and the URL and name of their file."""
    chosen = list(files)
    rows = engine.read_parquet([listing.url(file.path) for file in chosen], EVENTS, [file.cell for file in chosen])
    return rows.select(*(name for name, _ in ROWS), "path", "file_name")


def read_contents(engine: Engine, listing: Listing, snapshots: Sequence[Snapshot], name: str) -> Table:
    """Return one table of some snapshots (one of ``CONTENTS``), with ``cell``."""
    fields = CONTENTS[name]
    urls = [listing.url(f"{each.path}/{name}.parquet") for each in snapshots]
    engine.check_schema(urls, fields)
    return engine.read_parquet(urls, fields, [each.cell for each in snapshots]).drop("path", "file_name")


def read_back_table(engine: Engine, where: str, name: str, fields: Fields) -> Table:
    """Return one table of what was read back from a cluster; ``where`` is its directory."""
    url = f"{where.rstrip('/')}/{name}.parquet"
    engine.check_schema([url], fields)
    return engine.read_parquet([url], fields, [""]).select(*(each for each, _ in fields))


def read_sums(engine: Engine, listing: Listing, paths: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of files, by their path in the trail; computed where the files are read."""
    return dict(zip(paths, engine.sums([listing.url(path) for path in paths]), strict=True))
