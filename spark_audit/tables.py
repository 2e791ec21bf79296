"""Reading the trail: what there is, and tables with the columns that docs/TRAIL.md promises.

A trail may lie wherever the engine can read: DuckDB reads folders of this machine, Spark whatever Hadoop can
(``file:``, ``hdfs:``, ``s3a:``). What there is, is listed once; all later reads name their files, so a file that is
added meanwhile changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from spark_audit.frames.table import Engine, Table
from spark_audit.schema import ENTRIES, EVENTS, PROGRESS, QUEUES, ROWS, TRAIL_VERSION, Fields, TrailError

_EVENTS_PATH = re.compile(r"(events/cell=([^/]+)/date=([0-9-]{10})/hour=([0-9]{2})/([0-9]{20})-([0-9]{20})\.parquet)$")
_MANIFEST_PATH = re.compile(r"manifest/cell=([^/]+)/[0-9-]{10}\.jsonl$")
_SNAPSHOT_PATH = re.compile(r"snapshots/cell=([^/]+)/([0-9]{20})/manifest\.json$")


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
    """What ``cells/<cell>.json`` says; a cell without that file is taken for a daemon's."""

    cell: str
    role: str
    retired: int


class Snapshot(NamedTuple):
    """The head of a snapshot."""

    cell: str
    sequence: int
    taken_ms: int
    path: str  # relative to the trail
    sha256: dict[str, str]


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
        if _MANIFEST_PATH.search(path) or _SNAPSHOT_PATH.search(path) or re.fullmatch(r"cells/[^/]+\.json", path)
    ]
    texts = engine.texts(root, wanted)
    lines = [line for path in wanted if path.startswith("manifest/") for line in _manifest(path, texts[path])]
    cells = {cell.cell: cell for path in wanted if path.startswith("cells/") for cell in [_cell(path, texts[path])]}
    snapshots = [_snapshot(path, texts[path]) for path in wanted if path.startswith("snapshots/")]
    for name in {file.cell for file in files} - cells.keys():
        cells[name] = Cell(name, "daemon", 0)
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
        return Cell(value["cell"], value["role"], int(value.get("retired_sequence", 0)))


def _snapshot(path: str, text: str) -> Snapshot:
    value = _parse(path, text)
    with _fields(path):
        sha256 = {name: str(each["sha256"]) for name, each in value["files"].items()}
        where = path.removesuffix("/manifest.json")
        return Snapshot(value["cell"], int(value["sequence"]), int(value["taken_ms"]), where, sha256)


# --- tables -----------------------------------------------------------------------------------------------------------


def read_events(engine: Engine, listing: Listing, files: Iterable[EventFile]) -> Table:
    """Return the rows of some files with their cell (columns of ``ROWS``), and ``path``: the URL of their file."""
    chosen = list(files)
    rows = engine.read_parquet([listing.url(file.path) for file in chosen], EVENTS, [file.cell for file in chosen])
    return rows.select(*(name for name, _ in ROWS), "path")


def read_contents(engine: Engine, listing: Listing, snapshots: Sequence[Snapshot], name: str) -> Table:
    """Return one table of some snapshots (``entries``, ``queues`` or ``progress``), with ``cell``."""
    fields = {"entries": ENTRIES, "queues": QUEUES, "progress": PROGRESS}[name]
    urls = [listing.url(f"{each.path}/{name}.parquet") for each in snapshots]
    engine.check_schema(urls, fields)
    return engine.read_parquet(urls, fields, [each.cell for each in snapshots]).drop("path")


def read_back_table(engine: Engine, where: str, name: str, fields: Fields) -> Table:
    """Return one table of what was read back from a cluster; ``where`` is its directory."""
    url = f"{where.rstrip('/')}/{name}.parquet"
    engine.check_schema([url], fields)
    return engine.read_parquet([url], fields, [""]).select(*(each for each, _ in fields))


def read_sums(engine: Engine, listing: Listing, paths: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of files, by their path in the trail; computed where the files are read."""
    return dict(zip(paths, engine.sums([listing.url(path) for path in paths]), strict=True))
