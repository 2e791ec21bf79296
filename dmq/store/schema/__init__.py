"""Binary layout of every row in a store: keys, values, kinds and versions, as pure functions.

docs/reference/store.md draws them.

Every module that writes or reads a row uses these functions: the broker, the producer store, the trail, recovery.
Values start with a version. The number of a kind or of a version is never reused.
"""

from __future__ import annotations
