"""The ledger of a store against its rows: what every state machine asks after every step."""

from __future__ import annotations

from dmq.recovery.check.ledger import compare
from dmq.store.store import Store
from dmq.trail.ledger import Difference


def differences(store: Store) -> list[Difference]:
    """Return what does not balance in a store that nobody changes now."""
    return compare(store._engine)


def assert_balances(store: Store) -> None:
    """Fail with what does not balance."""
    assert store.ledger_head is not None
    found = differences(store)
    assert not found, "\n".join(map(str, found))
