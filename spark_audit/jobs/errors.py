"""Failures by the error that clients reported. Informational: they do not affect the verdict."""

from __future__ import annotations

from spark_audit.engines import Row, TableEngine
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs.options import Options
from spark_audit.rules.rows import kind_in
from spark_audit.schema import DEAD, REASONS
from spark_audit.tables import EventFile, TrailListing

ERRORS_MAX = 200


def errors_of(engine: TableEngine, listing: TrailListing, files: list[EventFile], options: Options) -> list[Row]:
    """Return the most frequent errors by group, in the range of the report, from readable files.

    Files of earlier builds do not have the column and add no errors.
    """
    urls = [listing.url(file.path) for file in files]
    rows = engine.read_parquet(urls, REASONS, [file.cell for file in files], is_sparse=True)
    failed = rows.where(F.col("error").is_not_null())
    if options.from_ms is not None:
        failed = failed.where(F.col("at_ms") >= options.from_ms)
    if options.to_ms is not None:
        failed = failed.where(F.col("at_ms") < options.to_ms)
    counted = failed.group_by("group", "error").agg(
        F.count_rows().alias("failures"), F.count_if(kind_in(*DEAD)).alias("dead"), F.max_of("at_ms").alias("last_ms")
    )
    try:
        found = counted.collect()
    except engine.errors:  # a file with readable columns otherwise is still judged; this table is only informational
        return []
    return sorted(map(dict, found), key=lambda row: (-row["failures"], str(row["group"]), row["error"]))[:ERRORS_MAX]
