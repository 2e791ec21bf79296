"""Requeue of dead entries in a directory that no process uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

from broker_adapter.runtime.clock import Clock
from dmq.errors import StoreLocked
from dmq.producer_store.directories.bounds import store_options
from dmq.producer_store.directories.copies import choosing
from dmq.producer_store.directories.root import Root
from dmq.producer_store.entries.entries import Entries, settling
from dmq.store import Store

_PER_UNIT = 256


def requeue(
    path: Path, clock: Clock, wanted: set[bytes], types: Collection[str], tell: Callable[[str], None]
) -> set[bytes]:
    """Make dead entries wait again, due now, and return their uids.

    An empty ``wanted`` selects all uids, empty ``types`` all types. Raise ``StoreLocked`` if a process uses the
    directory, or if it is being moved.
    """
    with choosing(path.parent):
        if (adopter := Root.adopter_of(path)) is not None:
            raise StoreLocked(f"{path} is being moved to {adopter}")
        store = Store.open(path, clock, store_options())
    moved = set[bytes]()
    try:
        entries = Entries(store)
        for name in sorted(entries.names.topics):
            if not types or name in types:
                moved |= _requeue_type(entries, name, wanted)
                tell(f"{len(moved):,} in {path.name}")
    finally:
        store.close()
    return moved


def _requeue_type(entries: Entries, name: str, wanted: set[bytes]) -> set[bytes]:
    moved = set[bytes]()
    after = b""
    while True:
        with entries.lock:
            uids = sorted(wanted) if wanted else [each.entry.uid for each in entries.dead(name, after, _PER_UNIT)]
        waiting: list[Future[None]] = []
        for uid in uids:
            done: Future[None] = Future()
            with entries.lock:
                if entries.requeue(name, uid, settling(done)):
                    waiting.append(done)
                    moved.add(uid)
        for done in waiting:
            done.result()
        if wanted or not uids:
            return moved
        after = uids[-1]
