"""Generation of store identities: on the first opening of a store, and on the first opening of a copy.

A store is a copy if its marker has the copy flag, as in a backup. It is also a copy if the marker file is not the one
that existed when the identity was generated. Renaming the directory within its file system keeps the identity.

Every handle issued by a store names its number and is authenticated with its secret. A copy therefore rejects handles
that were issued before the copy was made.
"""

from __future__ import annotations

import secrets

from dmq.store.schema.cell.identity import SECRET_BYTES, Identity, StorePlace


def draw(place: StorePlace) -> Identity:
    """Return a new random identity, unique among all stores."""
    return Identity(secrets.randbelow(2**64 - 1) + 1, secrets.token_bytes(SECRET_BYTES), place)
