"""Verdicts on errors of a handler. Each is also an exception, so that a handler may raise it.

Verdict
 +- Retry       it may succeed later; the policy sets the time
 +- Permanent   this message can never succeed
 +- Throttled   the destination requests a pause; costs no attempt
 +- Unknown     cause unknown; as Retry, but many at once count as an outage, a few as poison messages
 +- Unreadable  the kept bytes cannot be decoded; they stay in the dead set

A classifier returns one of them; a handler raises one. ``is_uncertain``: the attempt may have succeeded.
"""

from __future__ import annotations


class Verdict(Exception):
    """Base class of the verdicts on an error. Raise or return one of the subclasses."""

    is_uncertain = False


class Retry(Verdict):
    """The attempt failed for a reason that may pass, such as an unavailable broker."""

    def __init__(self, text: str = "", *, is_uncertain: bool = False) -> None:
        super().__init__(text)
        self.is_uncertain = is_uncertain


class Permanent(Verdict):
    """The message itself is refused permanently: a direct send is rejected, a kept message moves to the dead set."""


class Throttled(Verdict):
    """The destination requests a pause of ``after_s``: the attempt is not counted, no breaker opens."""

    def __init__(self, text: str = "", *, after_s: float = 1.0) -> None:
        super().__init__(text)
        if not 0 <= after_s <= 86_400:  # NaN is outside as well
            raise ValueError(f"after_s is {after_s!r}, allowed is 0 to 86400 s")
        self.after_s = after_s


class Unknown(Verdict):
    """The cause of the error is unknown, so the attempt may have succeeded."""

    def __init__(self, text: str = "", *, is_uncertain: bool = True) -> None:
        super().__init__(text)
        self.is_uncertain = is_uncertain


class Unreadable(Verdict, ValueError):
    """The payload cannot be decoded. Its bytes stay in the dead set, for a version that can decode them."""
