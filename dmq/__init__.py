"""Rock-DMQ: a delay and retry service for message queues that loses nothing and can prove it.

Importing this package is cheap: it loads neither gRPC nor RocksDB nor pydantic.
"""

from __future__ import annotations

import retry as _retry

if getattr(_retry, "DISTRIBUTION", None) != "rock-dmq":
    raise ImportError(
        f"the package 'retry' at {getattr(_retry, '__file__', None)} is not Rock-DMQ's: another distribution of that "
        "name is installed in this environment. Uninstall 'retry', then reinstall 'rock-dmq'."
    )
