"""Spark engine. Every table is a data frame. Every column is a text that Spark parses, so that it costs one JVM
call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, cast

import pyspark.sql.functions as F  # noqa: N812 - the name that Spark code goes by
from pyspark.sql import DataFrame, SparkSession

from spark_audit.engines.columns import Column, Dialect, Order, order_of
from spark_audit.engines.local import is_hidden, plain, read_texts, type_fault, version_fault, walk_folder
from spark_audit.engines.table import OF_A_FILE, How, Relation, Row, TableEngine, name_of
from spark_audit.schema import Fields, TrailError
from spark_audit.session import READ_ERRORS, is_small, set_for

_DIALECT = Dialect.SPARK
_VERSION_KEY = "rockdmq.trail_version"
_FOOTER_READERS = 16  # they mostly wait for an object store or the JVM
_COLUMN = re.compile(r"^  (?:optional|required) (\w+) (\w+)( \((?:STRING|LIST)\))?", re.MULTILINE)


class SparkTable(Relation):
    """Table that is a data frame."""

    __slots__ = ("_engine", "frame")

    def __init__(self, engine: SparkEngine, frame: DataFrame, columns: Sequence[str]) -> None:
        super().__init__(engine, tuple(columns))
        self._engine, self.frame = engine, frame

    def _made(self, frame: DataFrame, columns: Sequence[str] | None = None) -> SparkTable:
        return SparkTable(self._engine, frame, self.columns if columns is None else columns)

    def _selected(self, columns: Sequence[Column]) -> SparkTable:
        return self._made(self.frame.selectExpr(*map(_named, columns)), list(map(name_of, columns)))

    def where(self, condition: Column) -> SparkTable:
        return self._made(self.frame.where(condition.sql(_DIALECT)))

    def _grouped(self, keys: Sequence[Column], aggregates: Sequence[Column]) -> SparkTable:
        made = [F.expr(_named(each)) for each in aggregates]
        grouped = self.frame.groupBy(*(F.expr(_named(each)) for each in keys)).agg(*made)
        return self._made(grouped, list(map(name_of, (*keys, *aggregates))))

    def join(self, other: Relation, *, on: str | Sequence[str] | Column, how: How = "inner") -> SparkTable:
        right = cast("SparkTable", other)
        keys = [] if isinstance(on, Column) else [on] if isinstance(on, str) else list(on)
        condition = F.expr(on.sql(_DIALECT)) if isinstance(on, Column) else keys
        added = [] if how in {"left_semi", "left_anti"} else [name for name in other.columns if name not in keys]
        assert not set(added) & set(self.columns)
        joined = self.frame.join(right.frame, on=condition, how=how)
        names = (*keys, *(name for name in self.columns if name not in keys), *added)
        return self._made(joined, names)

    def union(self, other: Relation) -> SparkTable:
        return self._made(self.frame.unionByName(cast("SparkTable", other).frame))

    def distinct(self) -> SparkTable:
        return self._made(self.frame.distinct())

    def order_by(self, *order: str | Column | Order, limit: int | None = None) -> SparkTable:
        made = [order_of(each) for each in order]
        columns = [
            F.asc_nulls_last(F.expr(each.column.sql(_DIALECT))) if each.has_nulls_last
            else F.asc(F.expr(each.column.sql(_DIALECT)))
            for each in made
        ]  # fmt: skip
        ordered = self.frame.orderBy(*columns)
        return self._made(ordered if limit is None else ordered.limit(limit))

    def keep(self) -> SparkTable:
        """Return a table that is computed once and has no lineage in its plan.

        ``persist`` keeps the lineage: nested plans grow, and Spark analyses the whole plan at each query. The rows are
        stored on the executors, which spill them to disk when memory is short.
        """
        return self._made(self.frame.localCheckpoint(eager=False))

    def collect(self) -> list[Row]:
        return [row.asDict(recursive=True) for row in self.frame.collect()]

    def broadcast(self) -> SparkTable:
        return self._made(F.broadcast(self.frame))

    def gathered(self) -> SparkTable:
        """Return a table of a small trail (``set_for``) as one partition, any other unchanged.

        Used where files are read, and after joins for which Spark does not detect that the result is one partition.
        """
        return self._made(self.frame.coalesce(1)) if self._engine.is_small else self


class SparkEngine(TableEngine):
    """Engine on a Spark session."""

    name: ClassVar[str] = "spark"
    errors = READ_ERRORS

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.is_small = is_small(spark)

    @property
    def version(self) -> str:
        return "spark"  # its hash is equal in all versions

    def nanos(self) -> int:
        return int(self._jvm.java.lang.System.nanoTime())

    def close(self) -> None:
        self.spark.stop()

    @contextmanager
    def set_for(self, trail_bytes: int) -> Iterator[None]:
        with set_for(self.spark, trail_bytes):
            self.is_small = is_small(self.spark)
            try:
                yield
            finally:
                self.spark.catalog.clearCache()
        self.is_small = is_small(self.spark)

    def local_table(self, rows: Iterable[Sequence[Any]], fields: Fields) -> SparkTable:
        """Build the table in the JVM: ``createDataFrame`` would start Python processes for it."""
        names = [name for name, _ in fields]
        values = [dict(zip(names, row, strict=True)) for row in rows]
        if not values:
            nothing = self.spark.range(0).where(F.lit(False))
            return SparkTable(
                self, nothing.selectExpr(*(f"CAST(NULL AS {kind}) AS `{name}`" for name, kind in fields)), names
            )
        ddl = f"array<struct<{', '.join(f'`{name}`: {kind}' for name, kind in fields)}>>"
        made = self.spark.range(1, numPartitions=1).select(F.inline(F.from_json(F.lit(json.dumps(values)), ddl)))
        return SparkTable(self, made, names)

    def read_parquet(  # Spark always reads a missing column as null
        self,
        urls: Sequence[str],
        fields: Fields,
        cells: Sequence[str],  # noqa: ARG002
        *,
        is_sparse: bool = False,  # noqa: ARG002
    ) -> SparkTable:
        names = [name for name, _ in fields]
        if not urls:
            return self.local_table([], (*fields, *OF_A_FILE))
        schema = ", ".join(f"`{name}` {kind}" for name, kind in fields)
        reader = self.spark.read.schema(schema)
        has_cell = "/cell=" in urls[0]  # files read back from a cluster have no cell in their path
        if has_cell:
            reader = reader.option("basePath", re.sub(r"/cell=.*", "", urls[0]))
        of_a_file = {
            "cell": "cell" if has_cell else "'' AS cell",
            "path": "_metadata.file_path AS path",
            "file_name": "_metadata.file_name AS file_name",
        }
        added = [name for name in of_a_file if name not in names]
        quoted = [f"`{name}`" for name in names]
        made = reader.parquet(*urls).selectExpr(*quoted, *(of_a_file[name] for name in added))
        return SparkTable(self, made, (*names, *added)).gathered()

    def schema_faults(self, urls: Sequence[str], fields: Fields) -> dict[str, str]:
        jvm, conf = self._jvm, self._hadoop
        options = jvm.org.apache.parquet.HadoopReadOptions.builder(conf).build()  # by default read from XML each time

        def fault_of(url: str) -> str:
            try:
                source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(
                    jvm.org.apache.hadoop.fs.Path(url), conf
                )
                reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source, options)
                try:
                    about = reader.getFileMetaData()
                    text, version = str(about.getSchema().toString()), about.getKeyValueMetaData().get(_VERSION_KEY)
                finally:
                    reader.close()
            except READ_ERRORS:
                return ""  # reported when its rows are read
            types = {name: kind + (note or "") for kind, name, note in _COLUMN.findall(text)}
            return version_fault(version) or type_fault(types, fields)

        with ThreadPoolExecutor(max_workers=_FOOTER_READERS) as pool:
            return {url: fault for url, fault in zip(urls, pool.map(fault_of, urls), strict=True) if fault}

    def sums(self, urls: Sequence[str]) -> list[str]:
        """Compute the digests on the executors that read the files."""
        if not urls:
            return []
        found = self.spark.read.format("binaryFile").load(list(urls)).selectExpr("path", "sha2(content, 256) AS sum")
        rows = (found.coalesce(1) if self.is_small else found).collect()
        by_name = {plain(row["path"]): str(row["sum"]) for row in rows}
        return [by_name.get(plain(url), "") for url in urls]

    def walk(self, trail: str) -> tuple[str, list[tuple[str, int]]]:
        path = self._jvm.org.apache.hadoop.fs.Path(trail)
        system = path.getFileSystem(self._hadoop)
        qualified = system.makeQualified(path)
        if not system.exists(qualified):
            raise TrailError(f"{trail}: no such directory")
        root = str(qualified.toString()).rstrip("/")
        if folder := _local(root):  # Hadoop starts a process for each file
            return root, walk_folder(folder)
        found: list[tuple[str, int]] = []
        entries = system.listFiles(qualified, True)
        while entries.hasNext():
            status = entries.next()
            # the text of a Path is not escaped, so the rest after the root is the relative path
            relative = str(status.getPath().toString())[len(root) + 1 :]
            if not is_hidden(relative):
                found.append((relative, int(status.getLen())))
        return root, sorted(found)

    def texts(self, root: str, paths: Sequence[str]) -> dict[str, str]:
        if folder := _local(root):
            return read_texts(folder, paths)
        return {path: self._text(f"{root}/{path}") for path in paths}

    def collect_all(self, tables: Mapping[str, Relation]) -> dict[str, list[Row]]:
        """Collect all tables in one job, because each job has a fixed cost."""
        packed = [
            cast("SparkTable", table).frame.selectExpr(
                f"'{name}' AS name", "to_json(struct(*), map('ignoreNullFields', 'false')) AS row"
            )
            for name, table in tables.items()
        ]
        found: dict[str, list[Row]] = {name: [] for name in tables}
        for row in reduce(DataFrame.unionByName, packed).collect():
            found[row["name"]].append(json.loads(row["row"]))
        return found

    def write(self, table: Relation, url: str) -> None:
        cast("SparkTable", table).frame.write.mode("overwrite").parquet(url)

    def read(self, url: str, columns: Sequence[str]) -> SparkTable:
        return SparkTable(self, self.spark.read.parquet(url), columns).gathered()

    def names_in(self, url: str) -> list[str]:
        system, path = self._path(url)
        return [str(each.getPath().getName()) for each in system.listStatus(path)] if system.exists(path) else []

    def write_text(self, url: str, text: str) -> None:
        system, where = self._path(url)
        _, other = self._path(url + ".tmp")
        stream = system.create(other, True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()
        if not system.rename(other, where):
            raise OSError(f"{url} cannot be written")

    def remove(self, url: str) -> None:
        system, where = self._path(url)
        system.delete(where, True)

    def _text(self, url: str) -> str:
        system, where = self._path(url)
        stream = system.open(where)
        try:
            # the text as one string, because a call of the JVM costs more than the file
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode("utf-8", errors="replace")
        finally:
            stream.close()

    def _path(self, url: str) -> tuple[Any, Any]:
        """Return the Hadoop file system of a URL and its path there."""
        where = self._jvm.org.apache.hadoop.fs.Path(url)
        return where.getFileSystem(self._hadoop), where

    @property
    def _jvm(self) -> Any:  # noqa: ANN401 - py4j has no types
        return self.spark.sparkContext._jvm

    @property
    def _hadoop(self) -> Any:  # noqa: ANN401 - py4j has no types
        context = self.spark.sparkContext._jsc
        assert context is not None
        return context.hadoopConfiguration()


def _named(column: Column) -> str:
    return f"{column.sql(_DIALECT)} AS `{name_of(column)}`"


def _local(root: str) -> Path | None:
    """Return the directory of a trail on this machine, or None for any other URL."""
    return Path("/" + root.removeprefix("file:").lstrip("/")) if root.startswith("file:") else None
