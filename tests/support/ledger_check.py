"""The ledger of a store against its rows: what every state machine asks after every step."""

from __future__ import annotations

from dmq.audit.ledger import Difference, Ledger
from dmq.store.recount import KnownIds, recount_queues, recount_timeline
from dmq.store.store import Store, read_ledger


def differences(store: Store) -> list[Difference]:
    """Return what does not balance in a store that nobody changes now."""
    engine = store._engine
    known = KnownIds.of(engine)
    found = recount_queues(engine, known)
    recount_timeline(engine, known, found, lambda _: None)
    return Ledger(*read_ledger(engine), known).against_rows(found)


def assert_balances(store: Store) -> None:
    """Fail with what does not balance."""
    assert store.ledger_head is not None
    found = differences(store)
    assert not found, "\n".join(map(str, found))
