"""What an error of a handler means. Each is an exception too, so that a handler may raise it itself.

Verdict
 +- Retry       it may succeed later; the policy says when
 +- Permanent   this message can never succeed
 +- Throttled   the destination asks for a pause; costs no attempt
 +- Unknown     nobody knows; as Retry, but too many at once count as an outage, and few as poison
 +- Unreadable  the kept bytes cannot be understood; they stay in the dead set

A classifier returns one of them; a handler raises one. ``is_uncertain``: the attempt may have got through.
"""

from __future__ import annotations


class Verdict(Exception):
    """What an error means. Raise or return one of the subclasses."""

    is_uncertain = False


class Retry(Verdict):
    """The attempt failed for a reason that passes, such as a broker that is away."""

    def __init__(self, text: str = "", *, is_uncertain: bool = False) -> None:
        super().__init__(text)
        self.is_uncertain = is_uncertain


class Permanent(Verdict):
    """The message itself is refused and always will be: a direct send is rejected, a kept one goes to the dead set."""


class Throttled(Verdict):
    """The destination is up and asks to be left alone for ``after_s``: no attempt is counted, no breaker opens."""

    def __init__(self, text: str = "", *, after_s: float = 1.0) -> None:
        super().__init__(text)
        if not 0 <= after_s <= 86_400:  # NaN is outside as well
            raise ValueError(f"after_s is {after_s!r}, allowed is 0 to 86400 s")
        self.after_s = after_s


class Unknown(Verdict):
    """Nobody knows what the error means, so the attempt may have got through."""

    def __init__(self, text: str = "", *, is_uncertain: bool = True) -> None:
        super().__init__(text)
        self.is_uncertain = is_uncertain


class Unreadable(Verdict, ValueError):
    """The payload cannot be decoded. Its bytes are kept in the dead set, for a version that can."""
