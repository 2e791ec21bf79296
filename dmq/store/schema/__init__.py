"""Every byte that a store keeps: keys, values, kinds and versions, as pure functions. docs/STORE.md draws the rows.

Whoever writes a row asks here for its bytes, and so does whoever reads it: the broker, the spool, the audit, upkeep.
Values start with a version; a number of a kind or a version is never used for something else.
"""

from __future__ import annotations
