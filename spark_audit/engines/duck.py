"""DuckDB engine, in this process. Every table is a SELECT; nothing is computed before rows are collected."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import duckdb

from spark_audit.engines.columns import Column, Dialect, Order, order_of
from spark_audit.engines.local import read_texts, type_fault, version_fault, walk_folder
from spark_audit.engines.table import OF_A_FILE, How, Relation, Row, TableEngine, name_of
from spark_audit.schema import Fields, TrailError

_DIALECT = Dialect.DUCKDB
_JOINS: dict[How, str] = {
    "inner": "JOIN",
    "left": "LEFT JOIN",
    "full": "FULL JOIN",
    "left_semi": "SEMI JOIN",
    "left_anti": "ANTI JOIN",
}
_VERSION_KEY = b"rockdmq.trail_version"
_KINDS = {"INT64": "int64", "INT32": "int32", "BYTE_ARRAY": "binary", "BOOLEAN": "boolean"}


class DuckTable(Relation):
    """Table that is a SELECT."""

    __slots__ = ("_engine", "sql")

    def __init__(self, engine: DuckEngine, sql: str, columns: tuple[str, ...]) -> None:
        super().__init__(engine, columns)
        self._engine, self.sql = engine, sql

    def _made(self, sql: str, columns: Sequence[str] | None = None) -> DuckTable:
        return DuckTable(self._engine, sql, self.columns if columns is None else tuple(columns))

    def _selected(self, columns: Sequence[Column]) -> DuckTable:
        return self._made(f"SELECT {', '.join(map(_named, columns))} FROM ({self.sql})", list(map(name_of, columns)))

    def where(self, condition: Column) -> DuckTable:
        return self._made(f"SELECT * FROM ({self.sql}) WHERE {condition.sql(_DIALECT)}")

    def _grouped(self, keys: Sequence[Column], aggregates: Sequence[Column]) -> DuckTable:
        both = [*keys, *aggregates]
        by = f" GROUP BY {', '.join(each.sql(_DIALECT) for each in keys)}" if keys else ""
        return self._made(f"SELECT {', '.join(map(_named, both))} FROM ({self.sql}){by}", list(map(name_of, both)))

    def join(self, other: Relation, *, on: str | Sequence[str] | Column, how: How = "inner") -> DuckTable:
        right = cast("DuckTable", other)
        keys = () if isinstance(on, Column) else (on,) if isinstance(on, str) else tuple(on)
        if isinstance(on, Column):
            condition = on.sql(_DIALECT)
            assert not set(self.columns) & set(other.columns)
        else:
            condition = " AND ".join(f'l."{key}" = r."{key}"' for key in keys)
        here = [
            f'coalesce(l."{name}", r."{name}") AS "{name}"' if how == "full" and name in keys else f'l."{name}"'
            for name in self.columns
        ]
        added = [] if how in {"left_semi", "left_anti"} else [name for name in other.columns if name not in keys]
        assert not set(added) & set(self.columns)
        taken = ", ".join((*here, *(f'r."{name}"' for name in added)))
        sql = f"SELECT {taken} FROM ({self.sql}) AS l {_JOINS[how]} ({right.sql}) AS r ON {condition}"
        return self._made(sql, (*self.columns, *added))

    def union(self, other: Relation) -> DuckTable:
        assert set(self.columns) == set(other.columns), (self.columns, other.columns)
        names = ", ".join(f'"{name}"' for name in self.columns)
        return self._made(f"{self.sql} UNION ALL SELECT {names} FROM ({cast('DuckTable', other).sql})")

    def distinct(self) -> DuckTable:
        return self._made(f"SELECT DISTINCT * FROM ({self.sql})")

    def order_by(self, *order: str | Column | Order, limit: int | None = None) -> DuckTable:
        by = ", ".join(order_of(each).sql(_DIALECT) for each in order)
        return self._made(f"SELECT * FROM ({self.sql}) ORDER BY {by}{'' if limit is None else f' LIMIT {limit}'}")

    def keep(self) -> DuckTable:
        name = self._engine.new_name()
        self._engine.run(f'CREATE TEMP TABLE "{name}" AS {self.sql}')
        return self._made(f'SELECT * FROM "{name}"')

    def collect(self) -> list[Row]:
        return [dict(zip(self.columns, row, strict=True)) for row in self._engine.run(self.sql).fetchall()]


class DuckEngine(TableEngine):
    """In-memory database. Data that does not fit in memory spills to a temporary folder, which is removed on close."""

    name: ClassVar[str] = "duckdb"
    errors = (duckdb.Error, OSError)

    def __init__(self, threads: int | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="dmq-audit-")
        config: dict[str, Any] = {"temp_directory": self._scratch.name, "autoinstall_known_extensions": False}
        self._database = duckdb.connect(config=config if threads is None else {**config, "threads": threads})
        self._tables = 0

    def close(self) -> None:
        """Release the memory and the temporary disk space."""
        self._database.close()
        self._scratch.cleanup()

    @property
    def version(self) -> str:
        return f"duckdb {duckdb.__version__}"

    def nanos(self) -> int:
        return int(self.run("SELECT epoch_ns(now())").fetchall()[0][0])

    def run(self, sql: str) -> duckdb.DuckDBPyConnection:
        """Run a statement."""
        return self._database.execute(sql)

    def new_name(self) -> str:
        """Return an unused table name."""
        self._tables += 1
        return f"kept_{self._tables}"

    @contextmanager
    def set_for(self, trail_bytes: int) -> Iterator[None]:  # noqa: ARG002 - any size is read the same way
        before = self._tables
        try:
            yield
        finally:
            for number in range(before + 1, self._tables + 1):
                self.run(f'DROP TABLE IF EXISTS "kept_{number}"')
                self.run(f'DROP VIEW IF EXISTS "view_{number}"')

    def local_table(self, rows: Iterable[Sequence[Any]], fields: Fields) -> DuckTable:
        names = tuple(name for name, _ in fields)
        made = [f"({', '.join(map(_value, row))})" for row in rows]
        casts = ", ".join(f'CAST("{name}" AS {_type(kind)}) AS "{name}"' for name, kind in fields)
        if not made:
            empty = ", ".join(f'CAST(NULL AS {_type(kind)}) AS "{name}"' for name, kind in fields)
            return DuckTable(self, f"SELECT {empty} WHERE FALSE", names)
        columns = ", ".join(f'"{name}"' for name in names)
        sql = f"SELECT {casts} FROM (VALUES {', '.join(made)}) AS given({columns})"
        return DuckTable(self, sql, names).keep()

    def read_parquet(
        self, urls: Sequence[str], fields: Fields, cells: Sequence[str], *, is_sparse: bool = False
    ) -> DuckTable:
        names = tuple(name for name, _ in fields)
        if not urls:
            return self.local_table([], (*fields, *OF_A_FILE))
        by_cell: dict[str, list[str]] = {}
        for url, cell in zip(urls, cells, strict=True):
            by_cell.setdefault(cell, []).append(url)
        columns = ", ".join(f'"{name}"' for name in names)
        added = [name for name, _ in OF_A_FILE if name not in names]

        def of_a_file(cell: str) -> str:
            made = {"cell": _value(cell), "path": "filename", "file_name": "parse_filename(filename)"}
            return ", ".join(f"{made[name]} AS {name}" for name in added)

        def source(some: Sequence[str]) -> str:
            said = f"[{', '.join(map(_value, some))}], filename = true, hive_partitioning = false"
            if not is_sparse:
                return f"read_parquet({said})"
            empty = ", ".join(f'NULL::{_type(kind)} AS "{name}"' for name, kind in fields)
            rows = f"SELECT * FROM read_parquet({said}, union_by_name = true)"
            return f"(SELECT {empty} WHERE false UNION ALL BY NAME {rows})"

        parts = [f"SELECT {columns}, {of_a_file(cell)} FROM {source(some)}" for cell, some in by_cell.items()]
        sql = " UNION ALL ".join(parts)
        if len(urls) > 1:
            name = f"view_{self.new_name().removeprefix('kept_')}"
            self.run(f'CREATE TEMP VIEW "{name}" AS {sql}')
            sql = f'SELECT * FROM "{name}"'
        return DuckTable(self, sql, (*names, *added))

    def schema_faults(self, urls: Sequence[str], fields: Fields) -> dict[str, str]:
        about: dict[str, list[tuple[Any, ...]]] = {url: [] for url in urls}
        versions: dict[str, str] = {}
        some = f"[{', '.join(map(_value, urls))}]"
        try:
            if urls:
                said = "SELECT file_name, name, type, converted_type, num_children FROM parquet_schema"
                for url, *column in self.run(f"{said}({some})").fetchall():
                    about[url].append(tuple(column))
                for url, key, value in self.run(f"SELECT * FROM parquet_kv_metadata({some})").fetchall():
                    if bytes(key) == _VERSION_KEY:
                        versions[url] = bytes(value).decode(errors="replace")
        except self.errors:
            if len(urls) == 1:
                return {}
            return {url: fault for each in urls for url, fault in self.schema_faults([each], fields).items()}
        faults = {
            url: version_fault(versions.get(url)) or type_fault(_types_of(columns), fields)
            for url, columns in about.items()
        }
        return {url: fault for url, fault in faults.items() if fault}

    def sums(self, urls: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(_sum_of, urls))

    def walk(self, trail: str) -> tuple[str, list[tuple[str, int]]]:
        folder = Path(trail.removeprefix("file://"))
        if not folder.is_dir():
            raise TrailError(f"{trail}: no such directory")
        return str(folder.resolve()), walk_folder(folder)

    def texts(self, root: str, paths: Sequence[str]) -> dict[str, str]:
        return read_texts(Path(root), paths)

    def collect_all(self, tables: Mapping[str, Relation]) -> dict[str, list[Row]]:
        return {name: table.collect() for name, table in tables.items()}

    def write(self, table: Relation, url: str) -> None:
        Path(url).mkdir(parents=True)
        target = _value(f"{url}/part-0.parquet")
        self.run(f"COPY ({cast('DuckTable', table).sql}) TO {target} (FORMAT parquet, COMPRESSION zstd)")

    def read(self, url: str, columns: Sequence[str]) -> DuckTable:
        return DuckTable(self, f"SELECT * FROM read_parquet({_value(f'{url}/*.parquet')})", tuple(columns))

    def names_in(self, url: str) -> list[str]:
        folder = Path(url)
        return [path.name for path in folder.iterdir()] if folder.is_dir() else []

    def write_text(self, url: str, text: str) -> None:
        part = Path(url + ".tmp")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(url)

    def remove(self, url: str) -> None:
        if Path(url).is_file():
            Path(url).unlink()
        shutil.rmtree(url, ignore_errors=True)


def _named(column: Column) -> str:
    return f'{column.sql(_DIALECT)} AS "{name_of(column)}"'


def _type(kind: str) -> str:
    """Return the DuckDB name of a type of Spark's DDL."""
    if kind.startswith("array<struct<"):
        inside = kind.removeprefix("array<struct<").removesuffix(">>")
        return f"STRUCT({', '.join(' '.join(each.split(':')) for each in inside.split(', '))})[]"
    return f"{kind.removeprefix('array<').removesuffix('>')}[]" if kind.startswith("array<") else kind


def _value(value: Any) -> str:  # noqa: ANN401 - any value of a local table
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(name)}: {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _DIALECT.literal(value)


def _types_of(about: Sequence[tuple[Any, ...]]) -> dict[str, str]:
    """Return the types of the top-level columns of a Parquet schema, which lists parents before their children."""
    found: dict[str, str] = {}
    inside = 0
    for name, kind, note, children in about[1:]:
        if inside:
            inside += (children or 0) - 1
            continue
        inside = children or 0
        word = _KINDS.get(kind, str(kind).lower()) + (" (STRING)" if note == "UTF8" else "")
        found[name] = f"group ({note})" if children else word
    return found


def _sum_of(url: str) -> str:
    with Path(url).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
