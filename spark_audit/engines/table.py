"""Tables, and the engine that makes them: the little of relational algebra that the rules are written in."""

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


class Table(ABC):
    """Rows that are there, or can be computed. Every method returns another table."""

    __slots__ = ("columns", "engine")

    def __init__(self, engine: Engine, columns: tuple[str, ...]) -> None:
        self.engine = engine
        self.columns = columns

    @abstractmethod
    def _selected(self, columns: Sequence[Column]) -> Table: ...

    @abstractmethod
    def where(self, condition: Column) -> Table:
        """Return the rows of which a condition holds."""

    @abstractmethod
    def _grouped(self, keys: Sequence[Column], aggregates: Sequence[Column]) -> Table: ...

    @abstractmethod
    def join(self, other: Table, *, on: str | Sequence[str] | Column, how: How = "inner") -> Table:
        """Join by columns that both have, which are there once then; or by a condition, if they share no name."""

    @abstractmethod
    def union(self, other: Table) -> Table:
        """Add the rows of a table with the same columns, in whatever order."""

    @abstractmethod
    def distinct(self) -> Table:
        """Return each row once."""

    @abstractmethod
    def order_by(self, *order: str | Column | Order, limit: int | None = None) -> Table:
        """Put the rows into an order, and return all of them or the first ones."""

    @abstractmethod
    def keep(self) -> Table:
        """Return the same rows, computed once."""

    @abstractmethod
    def collect(self) -> list[Row]:
        """Fetch the rows."""

    def agg(self, *aggregates: Column) -> Table:
        """Sum all rows up to one."""
        return self._grouped((), aggregates)

    def count(self) -> int:
        """Fetch how many rows there are."""
        return int(self.agg(made("count(*)").alias("count")).collect()[0]["count"])

    def broadcast(self) -> Table:
        """Return the same, known to be small."""
        return self

    def gathered(self) -> Table:
        """Return the same in one place, if it is of a small trail."""
        return self

    def select(self, *columns: str | Column) -> Table:
        """Return these columns; ``*`` is all of them."""
        return self._selected(
            [one for each in columns for one in (map(col, self.columns) if _is_all(each) else (_column(each),))]
        )

    def with_column(self, name: str, column: Column) -> Table:
        """Add a column, or put it into the place of that of its name."""
        return self.with_columns({name: column})

    def with_columns(self, columns: Mapping[str, Column]) -> Table:
        """Add columns; all of them are made of what was there before."""
        names = dict.fromkeys((*self.columns, *columns))
        return self._selected([columns.get(name, col(name)).alias(name) for name in names])

    def renamed(self, name: str, to: str) -> Table:
        """Rename a column."""
        return self._selected([col(each).alias(to if each == name else each) for each in self.columns])

    def drop(self, *names: str) -> Table:
        """Leave columns away."""
        return self.select(*(each for each in self.columns if each not in names))

    def filled(self, value: int, names: Iterable[str]) -> Table:
        """Put a value in the place of nulls."""
        chosen = set(names)
        assert chosen <= set(self.columns)
        filled = {name: made("coalesce({0}, {1})", col(name), lit(value)) for name in chosen}
        return self.with_columns(filled)

    def group_by(self, *keys: str | Column) -> Groups:
        """Put rows together that have these columns in common."""
        return Groups(self, [_column(each) for each in keys])


class Groups:
    """The rows of a table by what they have in common."""

    def __init__(self, table: Table, keys: Sequence[Column]) -> None:
        self._table, self._keys = table, keys

    def agg(self, *aggregates: Column) -> Table:
        """Sum them up: one row for each group, with its keys."""
        return self._table._grouped(self._keys, aggregates)


class Engine(ABC):
    """Where tables come from, and files."""

    name: ClassVar[str]
    errors: tuple[type[Exception], ...]  # of reading and computing

    @property
    @abstractmethod
    def version(self) -> str:
        """Its name and version: hashes that are kept are those of one."""

    @abstractmethod
    def nanos(self) -> int:
        """Return the nanoseconds of a clock, to measure by."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    @abstractmethod
    def set_for(self, trail_bytes: int) -> AbstractContextManager[None]:
        """Set it for a trail of this size; as it was, and without what was kept, after the block."""

    @abstractmethod
    def local_table(self, rows: Iterable[Sequence[Any]], fields: Fields) -> Table:
        """Return a small table of values: texts, numbers, lists of numbers or of ``dict``; never bytes."""

    @abstractmethod
    def read_parquet(
        self, urls: Sequence[str], fields: Fields, cells: Sequence[str], *, is_sparse: bool = False
    ) -> Table:
        """Read these columns of files, and what they lack of ``OF_A_FILE``: whose file, its URL and its name.

        With ``is_sparse`` a column that a file does not have is null there.
        """

    @abstractmethod
    def schema_faults(self, urls: Sequence[str], fields: Fields) -> dict[str, str]:
        """Return, by URL, how the schemas of files differ from ``fields``. Files that cannot be read are left out."""

    @abstractmethod
    def sums(self, urls: Sequence[str]) -> list[str]:
        """Return the SHA-256 of files, empty for one without content; an error if one cannot be read."""

    @abstractmethod
    def walk(self, trail: str) -> tuple[str, list[tuple[str, int]]]:
        """Return the URL of a trail, and all its files with their sizes, sorted; ``TrailError`` if it is not there."""

    @abstractmethod
    def texts(self, root: str, paths: Sequence[str]) -> dict[str, str]:
        """Read small files whole; those of this machine that cannot be read are left out."""

    @abstractmethod
    def collect_all(self, tables: Mapping[str, Table]) -> dict[str, list[Row]]:
        """Fetch the rows of several small tables."""

    @abstractmethod
    def write(self, table: Table, url: str) -> None:
        """Write a table into a directory of Parquet files."""

    @abstractmethod
    def read(self, url: str, columns: Sequence[str]) -> Table:
        """Read a table that ``write`` wrote."""

    @abstractmethod
    def names_in(self, url: str) -> list[str]:
        """Return the names of what is in a directory; none if there is no such directory."""

    @abstractmethod
    def write_text(self, url: str, text: str) -> None:
        """Write a file so that it is there whole or not at all."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Remove a file, or a directory with its contents, if there is one."""

    def is_there(self, url: str) -> bool:
        """Say whether there is a file."""
        folder, _, name = url.rpartition("/")
        return name in self.names_in(folder)


def gathered(table: Table) -> Table:
    """Return a table of a small trail as one partition, where there are partitions; any other as it is."""
    return table.gathered()


def keep(table: Table) -> Table:
    """Return a table that is computed once."""
    return table.keep()


def name_of(column: Column) -> str:
    """Return the name of the column that an expression makes."""
    assert column.name is not None, "a column that is selected has a name"
    return column.name


def _column(what: str | Column) -> Column:
    return what if isinstance(what, Column) else col(what)


def _is_all(what: str | Column) -> bool:
    return isinstance(what, str) and what == "*"
