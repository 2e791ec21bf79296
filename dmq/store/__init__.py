"""The store: one RocksDB per cell, one writer thread, every state change and its audit event in one atomic batch.

Other parts describe what they want as ``Ops`` (``dmq.store.writer.operations``), plain values; only the writer
commits them. Nothing outside ``dmq.store.engines.rocks`` has heard of RocksDB.
"""

from __future__ import annotations
