"""Functions of columns that the rules need, under the names that Spark uses.

A text as an operand is the name of a column, except in ``lit`` and in the results of ``when``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from spark_audit.engines import columns
from spark_audit.engines.columns import Aggregate, Column, Dialect, Order, Value, made
from spark_audit.engines.table import Relation

Operand: TypeAlias = Column | str
col, lit = columns.col, columns.lit


def broadcast(table: Relation) -> Relation:
    """Mark a table as small enough to be copied to every executor, if the engine has executors."""
    return table.broadcast()


def _of(operand: Operand) -> Column:
    return operand if isinstance(operand, Column) else col(operand)


def _all_of(operands: Iterable[Operand]) -> list[Column]:
    return [_of(each) for each in operands]


def _call(name: str, *operands: Operand, duckdb: str | None = None) -> Column:
    slots = ", ".join(f"{{{number}}}" for number in range(len(operands)))
    return made(f"{name}({slots})", *_all_of(operands), duckdb=None if duckdb is None else f"{duckdb}({slots})")


# --- functions of one row ---------------------------------------------------------------------------------------------


class Case(Column):
    """CASE expression that ``when`` starts. It is null if no branch matches."""

    __slots__ = ("_branches",)

    def __init__(self, branches: tuple[tuple[Column, Column], ...], rest: Column | None = None) -> None:
        self._branches = branches

        def write(dialect: Dialect) -> str:
            said = " ".join(f"WHEN {when.sql(dialect)} THEN {then.sql(dialect)}" for when, then in branches)
            return f"(CASE {said}{'' if rest is None else f' ELSE {rest.sql(dialect)}'} END)"

        super().__init__(write)

    def when(self, condition: Operand, value: Column | Value) -> Case:
        """Add a branch: ``value`` in rows that match this condition and none of the conditions before."""
        return Case((*self._branches, (_of(condition), value if isinstance(value, Column) else lit(value))))

    def otherwise(self, value: Column | Value) -> Column:
        """Add the ELSE branch."""
        return Case(self._branches, value if isinstance(value, Column) else lit(value))


def when(condition: Operand, value: Column | Value) -> Case:
    """Return ``value`` in rows that match the condition."""
    return Case(()).when(condition, value)


def coalesce(*operands: Operand) -> Column:
    """Return the first operand that is not null."""
    return _call("coalesce", *operands)


def greatest(*operands: Operand) -> Column:
    """Return the greatest operand; nulls are ignored."""
    return _call("greatest", *operands)


def least(*operands: Operand) -> Column:
    """Return the least operand; nulls are ignored."""
    return _call("least", *operands)


def concat(*operands: Operand) -> Column:
    """Concatenate texts. The result is null if an operand is null."""
    slots = " || ".join(f"{{{number}}}" for number in range(len(operands)))
    return made(f"({slots})", *_all_of(operands))


def struct(*operands: Operand) -> Column:
    """Combine columns into one struct, with a field for each name."""
    parts = _all_of(operands)

    def write(dialect: Dialect) -> str:
        if dialect is Dialect.SPARK:
            return f"named_struct({', '.join(f'{dialect.literal(part.name)}, {part.sql(dialect)}' for part in parts)})"
        return "{" + ", ".join(f"{dialect.literal(part.name)}: {part.sql(dialect)}" for part in parts) + "}"

    return Column(write)


def pmod(operand: Operand, divisor: Operand) -> Column:
    """Return the remainder of a division, never negative."""
    return made("pmod({0}, {1})", _of(operand), _of(divisor), duckdb="((({0} % {1}) + {1}) % {1})")


def ceil(operand: Operand) -> Column:
    """Round up."""
    return _call("ceil", operand)


def bit_and(operand: Operand, mask: int) -> Column:
    """Return the bitwise AND with a mask."""
    return made("({0} & {1})", _of(operand), lit(mask))


def shift_right(operand: Operand, count: int) -> Column:
    """Shift a non-negative number to the right by ``count`` bits."""
    return made("shiftright({0}, {1})", _of(operand), lit(count), duckdb="({0} >> {1})")


def hash64(*operands: Operand) -> Column:
    """Return a 63-bit hash, never negative. The value differs between engines, so it only selects rows and is never
    reported.
    """
    slots = ", ".join(f"{{{number}}}" for number in range(len(operands)))
    spark = f"shiftrightunsigned(xxhash64({slots}), 1)"
    return made(spark, *_all_of(operands), duckdb=f"CAST(hash({slots}) >> 1 AS BIGINT)")


def hex_of(operand: Operand) -> Column:
    """Return bytes as upper-case hex digits."""
    return _call("hex", operand)


def octet_length(operand: Operand) -> Column:
    """Return the number of bytes."""
    return _call("octet_length", operand)


def bytes_of(operand: Operand, begin: int, count: int) -> Column:
    """Return ``count`` bytes from position ``begin``, which counts from 1."""
    spark, duckdb = f"substring({{0}}, {begin}, {count})", f"array_slice({{0}}, {begin}, {begin + count - 1})"
    return made(spark, _of(operand), duckdb=duckdb)


def text_of(operand: Operand, begin: int) -> Column:
    """Return the bytes from position ``begin`` (from 1) as text; null if they are not valid UTF-8."""
    spark = f"try_validate_utf8(CAST(substring({{0}}, {begin}) AS string))"
    return made(spark, _of(operand), duckdb=f"TRY(decode(from_hex(substr(hex({{0}}), {2 * begin - 1}))))")


def left(operand: Operand, count: int) -> Column:
    """Return the first ``count`` characters of a text."""
    return made(f"left({{0}}, {count})", _of(operand))


# --- lists ------------------------------------------------------------------------------------------------------------


def array(*operands: Operand) -> Column:
    """Combine columns into a list."""
    slots = ", ".join(f"{{{number}}}" for number in range(len(operands)))
    return made(f"array({slots})", *_all_of(operands), duckdb=f"[{slots}]")


def explode(operand: Operand) -> Column:
    """Return one row for each element that is not null."""
    duckdb = "unnest(list_filter({0}, lambda each: each IS NOT NULL))"
    return made("explode(array_compact({0}))", _of(operand), duckdb=duckdb)


def exists(operand: Operand, condition: Callable[[Column], Column]) -> Column:
    """Return True if an element matches the condition; null if the list is null."""
    inner = condition(Column(lambda _: "element"))
    duckdb = "(len(list_filter({0}, lambda element: {1})) > 0)"
    return made("exists({0}, element -> {1})", _of(operand), inner, duckdb=duckdb)


def first_of(operand: Operand, condition: Callable[[Column], Column]) -> Column:
    """Return the first element that matches the condition; null if none does."""
    inner = condition(Column(lambda _: "element"))
    duckdb = "(list_filter({0}, lambda element: {1})[1])"
    return made("get(filter({0}, element -> {1}), 0)", _of(operand), inner, duckdb=duckdb)


def array_contains(operand: Operand, element: Column | Value) -> Column:
    """Return True if a list contains the element; null if either is null."""
    sought = element if isinstance(element, Column) else lit(element)
    return made("array_contains({0}, {1})", _of(operand), sought, duckdb="list_contains({0}, {1})")


def array_min(operand: Operand) -> Column:
    """Return the least element."""
    return _call("array_min", operand, duckdb="list_min")


# --- aggregates -------------------------------------------------------------------------------------------------------


def count_rows() -> Aggregate:
    """Count the rows."""
    return Aggregate(made("count(*)"))


def count_if(condition: Operand) -> Aggregate:
    """Count the rows that match the condition."""
    return Aggregate(made("count_if({0})", _of(condition), duckdb="count(*) FILTER (WHERE {0})"))


def count_distinct(*operands: Operand) -> Aggregate:
    """Count distinct values; nulls are ignored."""
    slots = ", ".join(f"{{{number}}}" for number in range(len(operands)))
    duckdb = f"count(DISTINCT {slots if len(operands) == 1 else f'({slots})'})"
    return Aggregate(made(f"count(DISTINCT {slots})", *_all_of(operands), duckdb=duckdb))


def sum_of(operand: Operand) -> Aggregate:
    """Return the sum; null over no rows. A sum beyond 64 bits is an error."""
    return Aggregate(_call("sum", operand), "BIGINT")


def max_of(operand: Operand) -> Aggregate:
    """Return the greatest value."""
    return Aggregate(_call("max", operand))


def min_of(operand: Operand) -> Aggregate:
    """Return the least value."""
    return Aggregate(_call("min", operand))


def max_by(operand: Operand, by: Operand) -> Aggregate:
    """Return the value of ``operand`` in the row with the greatest ``by``; null if it is null in that row."""
    return Aggregate(_call("max_by", operand, by, duckdb="arg_max_null"))


def min_by(operand: Operand, by: Operand) -> Aggregate:
    """Return the value of ``operand`` in the row with the least ``by``; null if it is null in that row."""
    return Aggregate(_call("min_by", operand, by, duckdb="arg_min_null"))


def bit_xor(operand: Operand) -> Aggregate:
    """Return the exclusive or of numbers."""
    return Aggregate(_call("bit_xor", operand))


def bool_and(operand: Operand) -> Aggregate:
    """Return True if the condition holds for all rows."""
    return Aggregate(_call("bool_and", operand))


def collect_set(operand: Operand) -> Aggregate:
    """Return the distinct values that are not null, in no order."""
    spark, duckdb = "collect_set({0})", "coalesce(list(DISTINCT {0}) FILTER (WHERE {0} IS NOT NULL), [])"
    return Aggregate(made(spark, _of(operand), duckdb=duckdb))


def collect_sorted(operand: Operand) -> Aggregate:
    """Return the values, sorted."""
    return Aggregate(made("array_sort(collect_list({0}))", _of(operand), duckdb="list_sort(list({0}))"))


def row_number() -> Aggregate:
    """Return the number of each row of a window, from 1."""
    return Aggregate(made("row_number()"))


def lead(operand: Operand) -> Aggregate:
    """Return the value of the next row of a window."""
    return Aggregate(_call("lead", operand))


def row_id() -> Column:
    """Return a number that identifies each row, in no order."""
    return made("monotonically_increasing_id()", duckdb="row_number() OVER ()")


def nulls_last(operand: Operand) -> Order:
    """Return a sort key of a column with nulls last."""
    return Order(_of(operand), has_nulls_last=True)
