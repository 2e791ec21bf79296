"""An identity is drawn when a store is opened first, and anew when it turns out to be a copy.

It is one because its marker says so, as in a backup, or because the marker is another file than the one that was there
when the identity was drawn. A directory that is renamed on its file system keeps it. All that a store hands out to be
brought back names its number and is authenticated with its secret, so what was handed out before a copy was made means
nothing to the copy.
"""

from __future__ import annotations

import secrets

from dmq.store.schema.identity import SECRET_BYTES, Identity, Place


def draw(place: Place) -> Identity:
    """Return an identity that no other store has."""
    return Identity(secrets.randbelow(2**64 - 1) + 1, secrets.token_bytes(SECRET_BYTES), place)
