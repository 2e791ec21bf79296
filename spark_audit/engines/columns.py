"""Columns: expressions over the rows of a table, defined once and written as SQL of either engine."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, TypeAlias

Value: TypeAlias = bool | int | float | str | bytes | None


class Dialect(Enum):
    """SQL dialect."""

    SPARK = "spark"
    DUCKDB = "duckdb"

    def quoted(self, name: str) -> str:
        """Return a name as an identifier."""
        return f"`{name}`" if self is Dialect.SPARK else f'"{name}"'

    def literal(self, value: Value) -> str:
        """Return a value as SQL."""
        if value is None:
            return "NULL"
        if isinstance(value, bool):
            return "TRUE" if value else "FALSE"
        if isinstance(value, int):
            return str(value) if value >= 0 else f"({value})"
        if isinstance(value, float):
            return f"CAST({value!r} AS DOUBLE)"
        if isinstance(value, bytes):
            return f"X'{value.hex()}'" if self is Dialect.SPARK else f"from_hex('{value.hex()}')"
        if self is Dialect.DUCKDB:
            return "'" + value.replace("'", "''") + "'"
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


class Column:
    """Expression over the columns of a table. Operators return new expressions; an operand that is a plain value is a
    literal.
    """

    __hash__ = None  # type: ignore[assignment]  # == makes a column
    __slots__ = ("_write", "name")

    def __init__(self, write: Callable[[Dialect], str], name: str | None = None) -> None:
        self._write = write
        self.name = name  # name of the resulting column; None without an alias

    def sql(self, dialect: Dialect) -> str:
        """Return the expression in an engine's SQL."""
        return self._write(dialect)

    def alias(self, name: str) -> Column:
        """Set the name of the resulting column."""
        return Column(self._write, name)

    def cast(self, kind: str) -> Column:
        """Cast to another type: ``bigint``, ``int`` or ``string``."""
        return made(f"CAST({{0}} AS {kind})", self)

    def isin(self, *values: Value) -> Column:
        """Return True for rows in which the value is one of ``values``."""
        slots = ", ".join(f"{{{number}}}" for number in range(1, len(values) + 1))
        # DuckDB evaluates a function of one column once per dictionary word of a file, but IN once per row
        return made(f"({{0}} IN ({slots}))", self, *map(lit, values), duckdb=f"list_contains([{slots}], {{0}})")

    def is_null(self) -> Column:
        """Return True for rows in which the value is null."""
        return made("({0} IS NULL)", self)

    def is_not_null(self) -> Column:
        """Return True for rows in which the value is not null."""
        return made("({0} IS NOT NULL)", self)

    def startswith(self, text: str) -> Column:
        """Return True for rows in which the text starts with ``text``."""
        return made("startswith({0}, {1})", self, lit(text), duckdb="starts_with({0}, {1})")

    def __getitem__(self, name: str) -> Column:
        """Return a field of a struct."""
        return Column(lambda dialect: f"({self.sql(dialect)}).{dialect.quoted(name)}", name)

    def __eq__(self, other: Column | Value) -> Column:  # type: ignore[override]  # as SQL has it
        return self._with("=", other)

    def __ne__(self, other: Column | Value) -> Column:  # type: ignore[override]  # as SQL has it
        return self._with("<>", other)

    def __lt__(self, other: Column | Value) -> Column:
        return self._with("<", other)

    def __le__(self, other: Column | Value) -> Column:
        return self._with("<=", other)

    def __gt__(self, other: Column | Value) -> Column:
        return self._with(">", other)

    def __ge__(self, other: Column | Value) -> Column:
        return self._with(">=", other)

    def __and__(self, other: Column) -> Column:
        return self._with("AND", other)

    def __or__(self, other: Column) -> Column:
        return self._with("OR", other)

    def __invert__(self) -> Column:
        return made("(NOT {0})", self)

    def __neg__(self) -> Column:
        return made("(- {0})", self)

    def __add__(self, other: Column | Value) -> Column:
        return self._with("+", other)

    def __sub__(self, other: Column | Value) -> Column:
        return self._with("-", other)

    def __rsub__(self, other: Value) -> Column:
        return lit(other) - self

    def __mul__(self, other: Column | Value) -> Column:
        return self._with("*", other)

    def _with(self, operator: str, other: Column | Value) -> Column:
        return made(f"({{0}} {operator} {{1}})", self, other if isinstance(other, Column) else lit(other))


class Aggregate(Column):
    """Aggregate or ranking function, over a group of rows or over a window around each row."""

    __slots__ = ("_kind", "_of_rows")

    def __init__(self, of_rows: Column, kind: str | None = None) -> None:
        # DuckDB sums into a wider type than its input; Spark with ANSI raises an error on overflow.
        self._of_rows, self._kind = of_rows, kind
        super().__init__(self._cast(of_rows).sql)

    def over(self, window: RowWindow) -> Column:
        """Evaluate the aggregate for each row over the rows of its window."""
        return self._cast(Column(lambda dialect: f"{self._of_rows.sql(dialect)} OVER ({window.sql(dialect)})"))

    def _cast(self, of_rows: Column) -> Column:
        return of_rows if self._kind is None else made("{0}", of_rows, duckdb=f"CAST({{0}} AS {self._kind})")


class Order(NamedTuple):
    """Sort key, ascending. Nulls come first unless ``has_nulls_last`` is set."""

    column: Column
    has_nulls_last: bool = False

    def sql(self, dialect: Dialect) -> str:
        """Return the text after ORDER BY."""
        return f"{self.column.sql(dialect)} ASC NULLS {'LAST' if self.has_nulls_last else 'FIRST'}"


class RowWindow(NamedTuple):
    """Partition of the rows, with an order. ``frame`` (SQL) limits it to some rows around each row."""

    keys: tuple[Column, ...] = ()
    order: tuple[Order, ...] = ()
    frame: str = ""

    def sql(self, dialect: Dialect) -> str:
        """Return the text after OVER."""
        keys = ", ".join(each.sql(dialect) for each in self.keys)
        order = ", ".join(each.sql(dialect) for each in self.order)
        return f"{f'PARTITION BY {keys} ' if keys else ''}{f'ORDER BY {order} ' if order else ''}{self.frame}"

    @staticmethod
    def of(*keys: str) -> RowWindow:
        """Return the window of all rows with equal values in these columns."""
        return RowWindow(tuple(map(col, keys)))

    def in_order(self, *order: str | Column | Order) -> RowWindow:
        """Sort the rows of the window."""
        return self._replace(order=tuple(order_of(each) for each in order))

    def before(self) -> RowWindow:
        """Limit the window to the rows before each row."""
        return self._replace(frame="ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING")

    def up_to(self) -> RowWindow:
        """Limit the window to each row and the rows before it."""
        return self._replace(frame="ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW")


def made(template: str, *parts: Column, duckdb: str | None = None) -> Column:
    """Return the column of a SQL template in which ``{0}`` is the first part. ``duckdb`` replaces the template in
    DuckDB.
    """

    def write(dialect: Dialect) -> str:
        chosen = duckdb if duckdb is not None and dialect is Dialect.DUCKDB else template
        return chosen.format(*(part.sql(dialect) for part in parts))

    return Column(write)


def col(name: str) -> Column:
    """Return a column of the table."""
    return Column(lambda dialect: dialect.quoted(name), name)


def lit(value: Value) -> Column:
    """Return a value as a column."""
    return Column(lambda dialect: dialect.literal(value))


def order_of(what: str | Column | Order) -> Order:
    """Return the sort key of a column or a column name."""
    return what if isinstance(what, Order) else Order(what if isinstance(what, Column) else col(what))
