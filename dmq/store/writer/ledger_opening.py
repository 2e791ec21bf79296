"""The opening balance of the ledger, for a store without one or with a run that did not keep it.

A run that keeps the ledger records its number in the head. If the previous run did not, its changes are not counted.
The ledger then starts again from the current content of the store. Messages are never scanned; see ``recount``.
"""

from __future__ import annotations

from functools import partial

from dmq.store.engines.engine import Batch, Engine, queue_end
from dmq.store.schema.accounting.ledger import LedgerHead, Term, decode_head, encode_head, encode_ledger, ledger_key
from dmq.store.schema.keys import META_LEDGER, META_LEDGER_HEAD, Family, half_scope, meta_range
from dmq.store.writer.recount import KnownIds, Recount, assume_counts, recount_queues


def read_head(engine: Engine) -> LedgerHead | None:
    """Return the start of the ledger and the last run that kept it; ``None`` if there is no ledger."""
    (value,) = engine.get_many(Family.META, [META_LEDGER_HEAD])
    return decode_head(value) if value is not None else None


def open_ledger(engine: Engine, batch: Batch, *, run: int, now_ms: int) -> LedgerHead:
    """Put the head for ``run`` into its first batch, with an opening balance if the previous run kept no ledger."""
    head = read_head(engine)
    if head is None or head.run != run - 1:
        head = LedgerHead(run, now_ms)
        known = KnownIds.of(engine)
        found = recount_queues(engine, known, partial(queue_end, engine))
        assume_counts(engine, known, found)
        batch.ranges.append((Family.META, *meta_range(META_LEDGER)))
        batch.puts += [
            (Family.META, ledger_key(*pair), encode_ledger(counts))
            for pair, counts in _opening(known, found).items()
            if any(counts.values())
        ]
    head = head._replace(run=run)
    batch.puts.append((Family.META, META_LEDGER_HEAD, encode_head(head)))
    return head


def _opening(known: KnownIds, found: Recount) -> dict[tuple[int, int], dict[int, int]]:
    rows: dict[tuple[int, int], dict[int, int]] = {}
    for topic_id, stored in found.stored.items():
        rows[topic_id, 0] = {
            Term.STORED: stored,
            Term.STORED_BEFORE: stored,
            Term.PENDING_BEFORE: found.waiting.get(topic_id, 0),
            Term.HALF_BEFORE: found.waiting.get(half_scope(topic_id), 0),
        }
    for (topic_id, group_id), queues in found.queues.items():
        finished = found.stored[topic_id] - found.unfinished[topic_id, group_id]
        if not group_id:
            rows[topic_id, 0][Term.SETTLED_BEFORE] = finished
            continue
        rows.setdefault((topic_id, group_id), {}).update({Term.QUEUES: queues, Term.BEFORE: finished})
        if (lane := known.lanes.get(topic_id)) is not None:
            row = rows.setdefault((lane.topic_id, group_id), {})
            row[Term.LANE_BEFORE] = found.unfinished[topic_id, group_id]
    for (topic_id, group_id), copies in found.copies.items():
        rows.setdefault((topic_id, group_id), {})[Term.COPIES_BEFORE] = copies
    return rows
