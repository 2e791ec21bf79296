"""State that incremental runs pass on to the next run.

    <state>/v<number>/meta.json        written last: a version without it does not exist
                      counts sums rare open closed       Parquet

The list of processed files is part of a version, so a killed run has processed none. This is why new files are found
by listing and not by a stream. The checkpoint of a stream would be a second record, which could not change atomically
with the version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spark_audit.engines import Relation, TableEngine
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs.health import Content, FileFindings
from spark_audit.jobs.options import Options
from spark_audit.jobs.pipeline import keyed
from spark_audit.rules.density import OffsetGap, QueueFacts, Top
from spark_audit.rules.integrity import FileFacts, Gap
from spark_audit.rules.rows import kind_in
from spark_audit.schema import READS

STATE_FORMAT = 7
_TABLES = ("counts", "sums", "rare", "open", "closed")


@dataclass(slots=True)
class AuditState:
    """One version of the state."""

    number: int
    files: FileFindings
    roles: dict[str, str]  # of cells
    retired: list[str]  # retired cells, whose events no table here contains
    counts: Relation
    sums: Relation
    rare: Relation
    open_rows: Relation
    closed: Relation  # key, is_accepted: of correct messages
    subscribed: set[tuple[str, int]]  # cell, sequence
    queues: QueueFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """Results of a run that the next run starts from."""

    files: FileFindings
    roles: dict[str, str]
    retired: list[str]
    counts: Relation
    sums: Relation
    rare: Relation
    new_rows: Relation  # of this run, with letters
    open_rows: Relation  # of judged messages
    candidates: Relation | None  # their keys
    queues: QueueFacts


def load_state(engine: TableEngine, where: str, options: Options) -> AuditState | None:
    """Return the newest version. Return None if there is none or if its options differ."""
    numbers = _versions(engine, where)
    if not numbers:
        return None
    number = max(numbers)
    base = f"{where.rstrip('/')}/v{number}"
    meta = json.loads(engine.texts(base, ["meta.json"])["meta.json"])
    about = (STATE_FORMAT, engine.version, _lasting(options))
    if (meta["format"], meta.get("engine"), meta["options"]) != about:
        options.say("the state was made by another version or engine, or with other options; starting over")
        return None
    tables = {name: engine.read(f"{base}/{name}", meta["columns"][name]) for name in _TABLES}
    files = FileFindings(
        {path: Content(*each) for path, *each in meta["contents"]},
        {each[0]: FileFacts(*each) for each in meta["files"]},
        [Gap(*each) for each in meta["gaps"]],
        meta["findings"],
    )
    return AuditState(
        number=number,
        files=files,
        roles=meta["roles"],
        retired=meta["retired"],
        counts=tables["counts"],
        sums=tables["sums"],
        rare=tables["rare"],
        open_rows=tables["open"],
        closed=tables["closed"],
        subscribed={(cell, sequence) for cell, sequence in meta["subscribed"]},
        queues=QueueFacts(
            {(cell, topic, queue_id): Top(*top) for cell, topic, queue_id, *top in meta["tops"]},
            [OffsetGap(*each) for each in meta["holes"]],
            [(cell, topic, group, queue_id) for cell, topic, group, queue_id in meta["beyond"]],
            {(cell, topic, group, queue_id): Top(*top) for cell, topic, group, queue_id, *top in meta["exits"]},
        ),
    )


def save_state(
    engine: TableEngine,
    where: str,
    options: Options,
    kept: AuditState | None,
    facts: AuditFacts,
) -> None:
    """Write the next version, and remove all versions except this one and the one before."""
    files = facts.files
    numbers = _versions(engine, where)
    number = max(numbers, default=0) + 1
    base = f"{where.rstrip('/')}/v{number}"
    engine.remove(base)  # left over from a killed run
    closed = _closed(facts, kept, options)
    written = {"counts": facts.counts, "sums": facts.sums, "rare": facts.rare, "open": facts.open_rows}
    written["closed"] = closed
    for name, table in written.items():
        engine.write(table, f"{base}/{name}")
    rare = facts.rare.where(kind_in(*READS)).select("cell", "sequence").collect()
    meta = {
        "format": STATE_FORMAT,
        "engine": engine.version,
        "options": _lasting(options),
        "columns": {name: table.columns for name, table in written.items()},
        "files": sorted(files.facts.values()),
        "gaps": sorted(files.gaps),
        "findings": files.findings,
        "contents": sorted((path, *content) for path, content in files.contents.items()),
        "roles": facts.roles,
        "retired": facts.retired,
        "subscribed": sorted((row["cell"], row["sequence"]) for row in rare),
        "tops": sorted((*key, *top) for key, top in facts.queues.tops.items()),
        "holes": facts.queues.holes,
        "beyond": facts.queues.beyond,
        "exits": sorted((*key, *top) for key, top in facts.queues.exits.items()),
    }
    engine.write_text(f"{base}/meta.json", json.dumps(meta, sort_keys=True))
    for old in numbers:
        if old < number - 1:
            engine.remove(f"{where.rstrip('/')}/v{old}")


def _lasting(options: Options) -> dict[str, Any]:
    """Return the options that the saved state depends on."""
    names = ("window_ms", "late_after_ms", "key_bits", "verify")
    return {name: getattr(options, name) for name in names}


def _closed(facts: AuditFacts, kept: AuditState | None, options: Options) -> Relation:
    """Return the keys of correct messages, so that later events of them are detected."""
    is_accept = kind_in("SCHEDULED", "QUEUED") & ~F.col("is_letter")
    keys = keyed(facts.new_rows, options).group_by("key").agg(F.max_of(is_accept).alias("is_accepted"))
    if kept is not None:
        of_open = (
            keyed(kept.open_rows.drop("key"), options).group_by("key").agg(F.max_of(is_accept).alias("is_accepted"))
        )
        both = kept.closed.union(keys).union(of_open)
        keys = both.group_by("key").agg(F.max_of("is_accepted").alias("is_accepted"))
    return keys if facts.candidates is None else keys.join(facts.candidates, on="key", how="left_anti")


def _versions(engine: TableEngine, where: str) -> list[int]:
    numbers = [int(name[1:]) for name in engine.names_in(where) if name[:1] == "v" and name[1:].isdigit()]
    return [number for number in numbers if engine.is_there(f"{where.rstrip('/')}/v{number}/meta.json")]
