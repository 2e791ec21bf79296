"""The producer store (spool): a sink of the producer hook in RocksDB, with the daemon's store and timeline.

It runs in an application's process and needs no other package than the base distribution. Imports: ``dmq.broker``,
``dmq.trail``, ``dmq.store`` and below, and ``retry``. Interface: the names below; ``dmq.recovery`` checks and salvages
its directories.
"""

from __future__ import annotations

from dmq.producer_store.directories.adopt import Adopter
from dmq.producer_store.directories.bounds import SpoolOptions, store_options
from dmq.producer_store.directories.copies import (
    LOCK_FILE,
    choosing,
    copy_directory,
    directories_of,
    hold,
    holder,
    workplace,
    write_json,
)
from dmq.producer_store.directories.root import Root
from dmq.producer_store.directories.running import Running
from dmq.producer_store.durable_producer import durable
from dmq.producer_store.entries.damage import Hole, Readable, read_around
from dmq.producer_store.entries.entries import Entries, settling
from dmq.producer_store.entries.plan import size_of
from dmq.producer_store.requeue import requeue
from dmq.producer_store.spool import Spool

__all__ = [
    "LOCK_FILE",
    "Adopter",
    "Entries",
    "Hole",
    "Readable",
    "Root",
    "Running",
    "Spool",
    "SpoolOptions",
    "choosing",
    "copy_directory",
    "directories_of",
    "durable",
    "hold",
    "holder",
    "read_around",
    "requeue",
    "settling",
    "size_of",
    "store_options",
    "workplace",
    "write_json",
]
