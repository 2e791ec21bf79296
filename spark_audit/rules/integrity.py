"""Integrity of the trail: files checked by sums in closed form, exact checks where these fail, repeated records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spark_audit.engines import Relation, RowWindow
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.schema import ROWS

_SEQUENCE_DIGITS = 20  # of the first sequence, with which a file's name starts


class FileFacts(NamedTuple):
    """Sums over the rows of one file."""

    path: str
    rows: int
    first: int
    last: int
    total: int  # sum of distances to the sequence in the file's name, like the next two
    squares: int
    xor: int
    first_at_ms: int  # time of the first row, as a clock may step back within a file
    last_at_ms: int  # time of the last row
    at_ms_min: int
    at_ms_max: int

    def is_whole(self, first: int, last: int) -> bool:
        """Return True if the rows are exactly ``first`` to ``last``, as far as four sums can prove it."""
        count = last - first + 1
        expected = (count, count * (count - 1) // 2, (count - 1) * count * (2 * count - 1) // 6, xor_to(count - 1))
        return (self.rows, self.total, self.squares, self.xor) == expected


class Gap(NamedTuple):
    """Sequences of a cell that are missing or unreliable."""

    cell: str
    first: int
    last: int
    why: str


def file_facts(rows: Relation) -> list[FileFacts]:
    """Aggregate each file of ``rows`` (with ``path`` and ``file_name``)."""
    first = F.left("file_name", _SEQUENCE_DIGITS).cast("bigint")
    distance = F.col("sequence") - F.col("from")
    facts = (
        rows.select("path", "sequence", "at_ms", first.alias("from"))
        .group_by("path")
        .agg(
            F.count_rows().alias("rows"),
            F.min_of("sequence").alias("first"),
            F.max_of("sequence").alias("last"),
            F.sum_of(distance).alias("total"),
            F.sum_of(distance * distance).alias("squares"),
            F.bit_xor(distance).alias("xor"),
            F.min_by("at_ms", "sequence").alias("first_at_ms"),
            F.max_by("at_ms", "sequence").alias("last_at_ms"),
            F.min_of("at_ms").alias("at_ms_min"),
            F.max_of("at_ms").alias("at_ms_max"),
        )
    )
    return [FileFacts(**row) for row in facts.collect()]


def missing_in(rows: Relation, ranges: Sequence[tuple[str, int, int]]) -> list[Gap]:
    """Return the exact sequences that ``rows`` lack in each (cell, first, last)."""
    edges = rows.engine.local_table(
        [(cell, edge) for cell, first, last in ranges for edge in (first - 1, last + 1)],
        (("cell", "string"), ("sequence", "bigint")),
    )
    both = rows.select("cell", "sequence").union(edges).distinct()
    after = F.lead("sequence").over(RowWindow.of("cell").in_order("sequence"))
    holes = both.with_column("next", after).where(F.col("next") > F.col("sequence") + 1)
    found = []
    for row in holes.collect():
        for cell, first, last in ranges:
            low, high = max(first, row["sequence"] + 1), min(last, row["next"] - 1)
            if cell == row["cell"] and low <= high:
                found.append(Gap(cell, low, high, "records missing"))
    return sorted(set(found))


def repeated_in(rows: Relation) -> Relation:
    """Return (cell, sequence, count, is_same) of repeated records."""
    content = F.hash64(*(name for name, _ in ROWS))
    grouped = rows.group_by("cell", "sequence").agg(
        F.count_rows().alias("count"), (F.min_of(content) == F.max_of(content)).alias("is_same")
    )
    return grouped.where(F.col("count") > 1)


def once_each(rows: Relation) -> Relation:
    """Return each record once. Among records of different content the choice is arbitrary but stable."""
    names = [name for name, _ in ROWS]
    order = RowWindow.of("cell", "sequence").in_order(*names)
    return rows.with_column("turn", F.row_number().over(order)).where(F.col("turn") == 1).select(*names)


def join_gaps(gaps: Iterable[Gap]) -> list[Gap]:
    """Merge adjacent gaps with the same cause, and remove the parts that a more specific gap (given first) covers."""
    kept: list[Gap] = []
    for gap in gaps:
        parts = [(gap.first, gap.last)]
        for other in kept:
            if other.cell == gap.cell:
                parts = [
                    piece
                    for low, high in parts
                    for piece in ((low, min(high, other.first - 1)), (max(low, other.last + 1), high))
                    if piece[0] <= piece[1]
                ]
        kept += [Gap(gap.cell, low, high, gap.why) for low, high in dict.fromkeys(parts)]
    joined: list[Gap] = []
    for gap in sorted(kept):
        if joined and (joined[-1].cell, joined[-1].last + 1, joined[-1].why) == (gap.cell, gap.first, gap.why):
            joined[-1] = joined[-1]._replace(last=gap.last)
        else:
            joined.append(gap)
    return joined


def xor_to(number: int) -> int:
    """Return 0 ^ 1 ^ ... ^ number."""
    return (number, 1, number + 1, 0)[number % 4]
