"""What every part of Rock-DMQ agrees on: messages, names, limits, clocks, the wire protocol and the broker contracts.

Importing this package loads neither gRPC nor the wire definitions nor RocksDB.
"""

from __future__ import annotations
