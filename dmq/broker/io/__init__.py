"""The broker's access to the store: units of operations to the writer, reads on one thread, the tail cache.

Imports: ``dmq.store`` and below. Interface: commits, the reader, the queue log, the tail cache.
"""

from __future__ import annotations

from dmq.broker.io.commits import Commits, look_at, refusal_of
from dmq.broker.io.queue_log import Place, begin_of, messages_from, offset_stored_at
from dmq.broker.io.reader import Reader
from dmq.broker.io.tail_cache import LAG_MAX

__all__ = [
    "LAG_MAX",
    "Commits",
    "Place",
    "Reader",
    "begin_of",
    "look_at",
    "messages_from",
    "offset_stored_at",
    "refusal_of",
]
