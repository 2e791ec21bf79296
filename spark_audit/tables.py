"""Reading the trail: what there is, and tables with the columns that docs/TRAIL.md promises.

Everything goes through Spark, so a trail may lie wherever Hadoop can read: ``file:``, ``hdfs:``, ``s3a:``. What there
is, is listed once; all later reads name their files, so a file that is added meanwhile changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyspark.sql.functions as F  # noqa: N812 - the name that Spark code goes by
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, StructType

from spark_audit.schema import ENTRIES, EVENTS, PROGRESS, QUEUES, ROWS, TRAIL_VERSION, TrailError
from spark_audit.session import READ_ERRORS, gathered

_EVENTS_PATH = re.compile(r"(events/cell=([^/]+)/date=([0-9-]{10})/hour=([0-9]{2})/([0-9]{20})-([0-9]{20})\.parquet)$")
_MANIFEST_PATH = re.compile(r"manifest/cell=([^/]+)/[0-9-]{10}\.jsonl$")
_SNAPSHOT_PATH = re.compile(r"snapshots/cell=([^/]+)/([0-9]{20})/manifest\.json$")
_HIDDEN = re.compile(r"/[._][^/]*(?:/|$)|\.tmp(?:/|$)")


_VERSION_KEY = "rockdmq.trail_version"
_COLUMN = re.compile(r"^  (?:optional|required) (\w+) (\w+)( \((?:STRING|LIST)\))?", re.MULTILINE)
_PARQUET = {"bigint": "int64", "int": "int32", "string": "binary (STRING)", "binary": "binary", "boolean": "boolean"}


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


def list_trail(spark: SparkSession, trail: str) -> Listing:
    """List a trail. ``TrailError`` when there is none, or a part of it is of another version or unreadable."""
    root, paths = _walk(spark, trail)
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
    texts = _texts(spark, root, wanted)
    lines = [line for path in wanted if path.startswith("manifest/") for line in _manifest(path, texts[path])]
    cells = {cell.cell: cell for path in wanted if path.startswith("cells/") for cell in [_cell(path, texts[path])]}
    snapshots = [_snapshot(path, texts[path]) for path in wanted if path.startswith("snapshots/")]
    for name in {file.cell for file in files} - cells.keys():
        cells[name] = Cell(name, "daemon", 0)
    return Listing(root, tuple(sorted(files)), tuple(sorted(set(lines))), cells, tuple(sorted(snapshots)))


def _walk(spark: SparkSession, trail: str) -> tuple[str, list[tuple[str, int]]]:
    """Return where the trail is, and all its visible files with their sizes, sorted."""
    jvm, hadoop = spark.sparkContext._jvm, spark.sparkContext._jsc
    assert jvm is not None
    assert hadoop is not None
    path = jvm.org.apache.hadoop.fs.Path(trail)
    system = path.getFileSystem(hadoop.hadoopConfiguration())
    qualified = system.makeQualified(path)
    if not system.exists(qualified):
        raise TrailError(f"{trail}: no such directory")
    root = str(qualified.toString()).rstrip("/")
    found: list[tuple[str, int]] = []
    if local := _local(root):  # Hadoop starts a process for each file
        found = [(str(path.relative_to(local)), path.stat().st_size) for path in local.rglob("*") if path.is_file()]
        return root, sorted(each for each in found if not _HIDDEN.search("/" + each[0]))
    entries = system.listFiles(qualified, True)
    while entries.hasNext():
        status = entries.next()
        # a path's own text escapes nothing, so what begins with the root goes on relative to it
        relative = str(status.getPath().toString())[len(root) + 1 :]
        if not _HIDDEN.search("/" + relative):
            found.append((relative, int(status.getLen())))
    return root, sorted(found)


def _local(root: str) -> Path | None:
    """Return the directory of a trail that lies on this machine."""
    return Path("/" + root.removeprefix("file:").lstrip("/")) if root.startswith("file:") else None


def _texts(spark: SparkSession, root: str, paths: Sequence[str]) -> dict[str, str]:
    """Read small files whole, in the driver: manifests and heads."""
    jvm, hadoop = spark.sparkContext._jvm, spark.sparkContext._jsc
    assert jvm is not None
    assert hadoop is not None
    if local := _local(root):
        return {path: (local / path).read_text(encoding="utf-8", errors="replace") for path in paths}
    found = {}
    for path in paths:
        where = jvm.org.apache.hadoop.fs.Path(f"{root}/{path}")
        stream = where.getFileSystem(hadoop.hadoopConfiguration()).open(where)
        try:
            # text as one string: each call of the JVM costs more than the file
            content = bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()
        found[path] = content.decode("utf-8", errors="replace")
    return found


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
            yield ManifestLine(value["path"], value["cell"], first, last, rows, int(value["bytes"]), value["sha256"])


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


def check_schema(spark: SparkSession, urls: Sequence[str], expected: StructType) -> None:
    """Read the footers of some files; ``TrailError`` names the first column that is missing or of another type."""
    jvm, hadoop = spark.sparkContext._jvm, spark.sparkContext._jsc
    assert jvm is not None
    assert hadoop is not None
    conf = hadoop.hadoopConfiguration()
    options = jvm.org.apache.parquet.HadoopReadOptions.builder(conf).build()  # by default read from XML for each file
    for url in urls:
        try:
            path = jvm.org.apache.hadoop.fs.Path(url)
            source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf)
            reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source, options)
            try:
                about = reader.getFooter().getFileMetaData()
                text, version = str(about.getSchema().toString()), about.getKeyValueMetaData().get(_VERSION_KEY)
            finally:
                reader.close()
        except READ_ERRORS:
            continue  # whoever reads the rows finds out which files cannot be read
        if version not in {None, str(TRAIL_VERSION)}:
            raise TrailError(f"{url}: of version {version!r}, not {TRAIL_VERSION}")
        types = {name: kind + (note or "") for kind, name, note in _COLUMN.findall(text)}
        for column in expected:
            wanted = _PARQUET.get(column.dataType.simpleString(), "group (LIST)")
            if column.name not in types:
                raise TrailError(f"{url}: column {column.name} is missing")
            if types[column.name] != wanted:
                raise TrailError(f"{url}: column {column.name} is {types[column.name]}, not {wanted}")


def read_events(spark: SparkSession, listing: Listing, files: Iterable[EventFile]) -> DataFrame:
    """Return the rows of some files with their cell (columns of ``ROWS``), and ``path``: the file they are in."""
    urls = [listing.url(file.path) for file in files]
    names = [field.name for field in ROWS]
    if not urls:
        return empty_table(spark, ROWS).withColumn("path", F.lit(""))
    rows = spark.read.schema(EVENTS).option("basePath", listing.url("events")).parquet(*urls)
    return gathered(rows.select(*names, F.expr("_metadata.file_path").alias("path")))


def read_contents(spark: SparkSession, listing: Listing, snapshots: Sequence[Snapshot], name: str) -> DataFrame:
    """Return one table of some snapshots (``entries``, ``queues`` or ``progress``), with ``cell``."""
    schema = {"entries": ENTRIES, "queues": QUEUES, "progress": PROGRESS}[name]
    urls = [listing.url(f"{each.path}/{name}.parquet") for each in snapshots]
    if not urls:
        return empty_table(spark, schema).withColumn("cell", F.lit(""))
    check_schema(spark, urls, schema)
    base = spark.read.schema(schema).option("basePath", listing.url("snapshots")).parquet(*urls)
    return gathered(base.select(*schema.names, "cell"))


def read_back_table(spark: SparkSession, where: str, name: str, schema: StructType) -> DataFrame:
    """Return one table of what was read back from a cluster; ``where`` is its directory."""
    url = f"{where.rstrip('/')}/{name}.parquet"
    check_schema(spark, [url], schema)
    return gathered(spark.read.schema(schema).parquet(url))


def read_sums(spark: SparkSession, listing: Listing, paths: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of files, by their path in the trail; computed where the files are read."""
    if not paths:
        return {}
    urls = [listing.url(path) for path in paths]
    found = spark.read.format("binaryFile").load(urls).select("path", F.sha2("content", 256).alias("sum"))
    by_name = {plain(row["path"]): row["sum"] for row in gathered(found).collect()}
    return {path: by_name[plain(listing.url(path))] for path in paths}


def local_table(spark: SparkSession, rows: Iterable[Sequence[Any]], schema: str) -> DataFrame:
    """Return a small table that the JVM makes by itself: ``createDataFrame`` would start Python processes for it.

    ``schema`` is that of the columns, as in ``a long, b string``; there are no binary ones.
    """
    columns = StructType.fromDDL(schema)
    assert isinstance(columns, StructType)
    values = [dict(zip(columns.names, row, strict=True)) for row in rows]
    if not values:
        return empty_table(spark, columns)
    text = F.lit(json.dumps(values))
    return spark.range(1, numPartitions=1).select(F.inline(F.from_json(text, ArrayType(columns))))


def empty_table(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a table without rows; what is joined with it costs nothing."""
    return (
        spark.range(0)
        .where(F.lit(False))
        .select(*(F.lit(None).cast(each.dataType).alias(each.name) for each in schema))
    )


def plain(url: str) -> str:
    """Return a form of a URL that is the same whoever wrote it: ``file:/a``, ``file:///a``, escaped or not."""
    return re.sub(r"^([a-z0-9]+):/*", r"\1:/", unquote(url))
