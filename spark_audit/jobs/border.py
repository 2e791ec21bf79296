"""Comparison of the messages sent to a cluster with the messages read back from it; only on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_audit.engines import Relation, TableEngine, keep
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs import pipeline
from spark_audit.jobs.health import CellState
from spark_audit.jobs.ledgers import Ledger
from spark_audit.jobs.options import Options
from spark_audit.rules.border import ReadBack, border_findings, border_totals, compare
from spark_audit.rules.findings import join_findings
from spark_audit.schema import READ_CELLS, READ_MESSAGES, READ_QUEUES
from spark_audit.tables import read_back_table


class ForwardingLedger(NamedTuple):
    """Ledger of the messages sent to a cluster, its findings, and all events of the affected messages."""

    table: Ledger
    findings: Relation
    rows: Relation


def look_at_border(
    engine: TableEngine, rows: Relation, cells: Sequence[CellState], where: str, options: Options
) -> ForwardingLedger:
    """Compare ``rows``, the whole trail, with the data read back into the directory ``where``."""
    read = ReadBack(
        messages=read_back_table(engine, where, "messages", READ_MESSAGES),
        queues=read_back_table(engine, where, "queues", READ_QUEUES),
        cells=read_back_table(engine, where, "cells", READ_CELLS),
    )
    broken = [each.cell for each in cells if each.gaps or each.undone or each.retired]
    compared = keep(compare(rows, read, broken, window_ms=options.window_ms))
    reasons = read.queues.where(F.col("why").is_not_null()).group_by("topic").agg(F.min_of("why").alias("why"))
    totals = border_totals(compared).join(reasons, on="topic", how="left").order_by("topic")
    table = totals.collect()
    findings = keep(join_findings([border_findings(compared)]))
    named = findings.select("topic", F.col("packed_id").alias("message_id")).distinct()
    concerned = keep(
        pipeline.keyed(rows, options).join(F.broadcast(named), on=["topic", "message_id"], how="left_semi")
    )
    return ForwardingLedger(table, findings, concerned)
