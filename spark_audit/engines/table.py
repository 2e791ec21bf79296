"""Abstract tables and engines: the subset of relational algebra that the rules use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Literal, TypeAlias

from spark_audit.engines.columns import Column, Order, col, lit, made
from spark_audit.schema import Fields

Row: TypeAlias = dict[str, Any]
OF_A_FILE: Final[Fields] = (("cell", "string"), ("path", "string"), ("file_name", "string"))
How: TypeAlias = Literal["inner", "left", "full", "left_semi", "left_anti"]


class Relation(ABC):
    """Table of rows, computed or still to be computed. Every method returns another table unless it fetches rows."""

    __slots__ = ("columns", "engine")

    def __init__(self, engine: TableEngine, columns: tuple[str, ...]) -> None:
        self.engine = engine
        self.columns = columns

    @abstractmethod
    def _selected(self, columns: Sequence[Column]) -> Relation: ...

    @abstractmethod
    def where(self, condition: Column) -> Relation:
        """Return the rows that match a condition."""

    @abstractmethod
    def _grouped(self, keys: Sequence[Column], aggregates: Sequence[Column]) -> Relation: ...

    @abstractmethod
    def join(self, other: Relation, *, on: str | Sequence[str] | Column, how: How = "inner") -> Relation:
        """Join on columns that both tables have, each of them once in the result; or on a condition, if they share no
        name.
        """

    @abstractmethod
    def union(self, other: Relation) -> Relation:
        """Append the rows of a table with the same columns, in any column order."""

    @abstractmethod
    def distinct(self) -> Relation:
        """Remove duplicate rows."""

    @abstractmethod
    def order_by(self, *order: str | Column | Order, limit: int | None = None) -> Relation:
        """Sort the rows and return all of them or the first ``limit``."""

    @abstractmethod
    def keep(self) -> Relation:
        """Return the same rows, computed once."""

    @abstractmethod
    def collect(self) -> list[Row]:
        """Fetch all rows."""

    def agg(self, *aggregates: Column) -> Relation:
        """Aggregate all rows into one."""
        return self._grouped((), aggregates)

    def count(self) -> int:
        """Fetch the number of rows."""
        return int(self.agg(made("count(*)").alias("count")).collect()[0]["count"])

    def broadcast(self) -> Relation:
        """Mark the table as small enough to broadcast."""
        return self

    def gathered(self) -> Relation:
        """Return the table as one partition if the trail is small."""
        return self

    def select(self, *columns: str | Column) -> Relation:
        """Select columns; ``*`` selects all."""
        return self._selected(
            [one for each in columns for one in (map(col, self.columns) if _is_all(each) else (_column(each),))]
        )

    def with_column(self, name: str, column: Column) -> Relation:
        """Add a column, or replace the one of the same name."""
        return self.with_columns({name: column})

    def with_columns(self, columns: Mapping[str, Column]) -> Relation:
        """Add several columns. Each expression sees the columns from before the call."""
        names = dict.fromkeys((*self.columns, *columns))
        return self._selected([columns.get(name, col(name)).alias(name) for name in names])

    def renamed(self, name: str, to: str) -> Relation:
        """Rename a column."""
        return self._selected([col(each).alias(to if each == name else each) for each in self.columns])

    def drop(self, *names: str) -> Relation:
        """Remove columns."""
        return self.select(*(each for each in self.columns if each not in names))

    def filled(self, value: int, names: Iterable[str]) -> Relation:
        """Replace nulls in the named columns."""
        chosen = set(names)
        assert chosen <= set(self.columns)
        filled = {name: made("coalesce({0}, {1})", col(name), lit(value)) for name in chosen}
        return self.with_columns(filled)

    def group_by(self, *keys: str | Column) -> GroupedTable:
        """Group the rows by these columns."""
        return GroupedTable(self, [_column(each) for each in keys])


class GroupedTable:
    """Rows of a table, grouped by columns."""

    def __init__(self, table: Relation, keys: Sequence[Column]) -> None:
        self._table, self._keys = table, keys

    def agg(self, *aggregates: Column) -> Relation:
        """Aggregate each group into one row, which also holds its keys."""
        return self._table._grouped(self._keys, aggregates)


class TableEngine(ABC):
    """Source of tables, with access to files."""

    name: ClassVar[str]
    errors: tuple[type[Exception], ...]  # errors of reading and computing

    @property
    @abstractmethod
    def version(self) -> str:
        """Return name and version of the engine. Stored hashes are valid for one version only."""

    @abstractmethod
    def nanos(self) -> int:
        """Return the nanoseconds of a monotonic clock."""

    @abstractmethod
    def close(self) -> None:
        """Close the engine."""

    @abstractmethod
    def set_for(self, trail_bytes: int) -> AbstractContextManager[None]:
        """Tune the engine for a trail of this size. After the block the old settings apply and kept tables are gone."""

    @abstractmethod
    def local_table(self, rows: Iterable[Sequence[Any]], fields: Fields) -> Relation:
        """Return a small table of texts, numbers, and lists of numbers or of ``dict``; bytes are not supported."""

    @abstractmethod
    def read_parquet(
        self, urls: Sequence[str], fields: Fields, cells: Sequence[str], *, is_sparse: bool = False
    ) -> Relation:
        """Read these columns of files, and add the columns of ``OF_A_FILE``: the cell, the URL and the name of the
        file.

        With ``is_sparse``, a column that is missing in a file is null.
        """

    @abstractmethod
    def schema_faults(self, urls: Sequence[str], fields: Fields) -> dict[str, str]:
        """Return the differences between the schemas of files and ``fields``, by URL. Unreadable files are left out."""

    @abstractmethod
    def sums(self, urls: Sequence[str]) -> list[str]:
        """Return the SHA-256 of files; empty for an empty file. Raise an error if a file cannot be read."""

    @abstractmethod
    def walk(self, trail: str) -> tuple[str, list[tuple[str, int]]]:
        """Return the URL of a trail and its files with their sizes, sorted. Raise ``TrailError`` if it does not
        exist.
        """

    @abstractmethod
    def texts(self, root: str, paths: Sequence[str]) -> dict[str, str]:
        """Read small files completely; unreadable local files are left out."""

    @abstractmethod
    def collect_all(self, tables: Mapping[str, Relation]) -> dict[str, list[Row]]:
        """Fetch the rows of several small tables."""

    @abstractmethod
    def write(self, table: Relation, url: str) -> None:
        """Write a table into a directory of Parquet files."""

    @abstractmethod
    def read(self, url: str, columns: Sequence[str]) -> Relation:
        """Read a table that ``write`` stored."""

    @abstractmethod
    def names_in(self, url: str) -> list[str]:
        """Return the names of the entries of a directory; empty if it does not exist."""

    @abstractmethod
    def write_text(self, url: str, text: str) -> None:
        """Write a file atomically."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Remove a file, or a directory with its contents, if it exists."""

    def is_there(self, url: str) -> bool:
        """Return True if the file exists."""
        folder, _, name = url.rpartition("/")
        return name in self.names_in(folder)


def gathered(table: Relation) -> Relation:
    """Return a table of a small trail as one partition, if the engine has partitions; any other unchanged."""
    return table.gathered()


def keep(table: Relation) -> Relation:
    """Return a table that is computed once."""
    return table.keep()


def name_of(column: Column) -> str:
    """Return the name of the column that an expression produces."""
    assert column.name is not None, "a column that is selected has a name"
    return column.name


def _column(what: str | Column) -> Column:
    return what if isinstance(what, Column) else col(what)


def _is_all(what: str | Column) -> bool:
    return isinstance(what, str) and what == "*"
