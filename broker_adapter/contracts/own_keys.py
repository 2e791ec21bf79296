"""Own keys: user properties by which a sender names a pending delayed message, and replaces it.

===================  ==========================================================================================
``DMQ_KEY``          the key: 1 to 128 bytes of UTF-8, printable characters, not spaces alone
``DMQ_ON_SAME_KEY``  handling of a pending message of the same topic with the same key:
                     ``replace`` (default): it is cancelled, and replaced by the new one with its own time;
                     ``keep``: it stays, and the new one is not stored
===================  ==========================================================================================

An own key is not one of a message's ``keys``, which are words for look-ups and need not be unique.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import OWN_KEY_BYTES_MAX

OWN_KEY, ON_SAME_KEY = "DMQ_KEY", "DMQ_ON_SAME_KEY"
REPLACE, KEEP = "replace", "keep"


def own_key_of(properties: Mapping[str, str]) -> str:
    """Return the own key of a message with these user properties; empty if it has none.

    An invalid key counts as none: it is refused when a message is accepted.
    """
    key = properties.get(OWN_KEY, "")
    return key if _is_own_key(key) else ""


def keeps_first(properties: Mapping[str, str]) -> bool:
    """Return True if these user properties keep a pending message with the same own key."""
    return properties.get(ON_SAME_KEY) == KEEP


def check_own_key(key: str, name: str = "the own key") -> str:
    """Return a valid own key, or raise ``Refused(PROPERTY_KEY)``; ``name`` is its source for the error."""
    if not _is_own_key(key):
        why, limit = f"{name} is not printable text, or is spaces alone", f"1 to {OWN_KEY_BYTES_MAX} bytes of UTF-8"
        raise Refused(Rule.PROPERTY_KEY, why, value=key, limit=limit)
    return key


def check_own_key_of(properties: Mapping[str, str]) -> None:
    """Check the own key of a message with these user properties, if it has one; ``Refused(PROPERTY_KEY)``."""
    wish = properties.get(ON_SAME_KEY, REPLACE)
    if wish not in {REPLACE, KEEP}:
        raise Refused(Rule.PROPERTY_KEY, f"property {ON_SAME_KEY} is neither {REPLACE} nor {KEEP}", value=wish)
    if OWN_KEY in properties:
        check_own_key(properties[OWN_KEY], f"property {OWN_KEY}")
    elif ON_SAME_KEY in properties:
        why = f"property {ON_SAME_KEY} has no effect without property {OWN_KEY}"
        raise Refused(Rule.PROPERTY_KEY, why, value=wish)


def _is_own_key(key: str) -> bool:
    return key.isprintable() and not key.isspace() and 0 < len(key.encode()) <= OWN_KEY_BYTES_MAX
