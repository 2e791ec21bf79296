"""The store: one RocksDB per cell, one writer thread, and every state change with its audit event in one atomic batch.

Other packages describe changes as ``Ops`` (``dmq.store.writer.operations``), which are plain values. Only the writer
commits them. Only ``dmq.store.engines.rocks`` depends on RocksDB.
"""

from __future__ import annotations
