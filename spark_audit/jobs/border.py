"""What went to a cluster, against what was read back from there; only if that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyspark.sql.functions as F  # noqa: N812 - the name that Spark code goes by
from pyspark.sql import DataFrame, SparkSession

from spark_audit.jobs import pipeline
from spark_audit.jobs.health import CellState
from spark_audit.jobs.ledgers import Table
from spark_audit.jobs.options import Options
from spark_audit.schema import READ_CELLS, READ_MESSAGES, READ_QUEUES
from spark_audit.session import keep
from spark_audit.tables import read_back_table
from spark_audit.transforms.border import ReadBack, border_findings, border_totals, compare
from spark_audit.transforms.findings import join_findings


class Border(NamedTuple):
    """The ledger of what went to the cluster, what is wrong, and all events of the messages concerned."""

    table: Table
    findings: DataFrame
    rows: DataFrame


def look_at_border(
    spark: SparkSession, rows: DataFrame, cells: Sequence[CellState], where: str, options: Options
) -> Border:
    """Compare ``rows``, all of the trail, with what was read back into the directory ``where``."""
    read = ReadBack(
        messages=read_back_table(spark, where, "messages", READ_MESSAGES),
        queues=read_back_table(spark, where, "queues", READ_QUEUES),
        cells=read_back_table(spark, where, "cells", READ_CELLS),
    )
    broken = [each.cell for each in cells if each.gaps or each.retired]
    compared = keep(compare(rows, read, broken, window_ms=options.window_ms))
    reasons = read.queues.where(F.col("why").isNotNull()).groupBy("topic").agg(F.min("why").alias("why"))
    totals = border_totals(compared).join(reasons, on="topic", how="left").orderBy("topic")
    table = [row.asDict() for row in totals.collect()]
    findings = keep(join_findings([border_findings(compared)]))
    named = findings.select("topic", F.col("packed_id").alias("message_id")).distinct()
    concerned = keep(
        pipeline.keyed(rows, options).join(F.broadcast(named), on=["topic", "message_id"], how="left_semi")
    )
    return Border(table, findings, concerned)
