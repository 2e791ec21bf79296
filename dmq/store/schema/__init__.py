"""Binary layout of every row in a store: keys, values, kinds and versions, as pure functions.

docs/reference/store.md draws them.

``messages``    timeline and queues, the index, own keys, indexed properties, schedules
``topics``      topics and consumer groups: names, settings, progress
``operators``   activities, limits, commands that resume after a restart
``accounting``  pending counts, the ledger, the audit outbox
``cell``        the store itself: identity, clock, forwarding state, replication position
``spool``       the rows that only a producer store has
``keys``        column families, and keys

Every module that writes or reads a row uses these functions: the broker, the producer store, the trail, recovery.
Values start with a version. The number of a kind or of a version is never reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.store.schema import keys, spool  # noqa: TC004 - namespaces, loaded at their first import

__all__ = ["keys", "spool"]
