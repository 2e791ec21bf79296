"""Failure reason of a delivery, as its client reported it: untrusted text, made safe to store and to show. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

TYPE_BYTES_MAX: Final = 128
TEXT_BYTES_MAX: Final = 1024
NAME_BYTES_MAX: Final = 255  # of a host, a client id, an address
NOT_REPORTED: Final = "reason not reported by the client"


class FailureReason(NamedTuple):
    """Reason of one failed delivery and the client that reported it. Every text is printable and bounded; empty:
    unknown.

    ``error_type`` and ``error_text`` are both empty if the client reported no reason.
    """

    error_type: str = ""
    error_text: str = ""
    host: str = ""  # host that ran the handler
    client_id: str = ""
    address: str = ""

    @property
    def error(self) -> str:
        """The error on one line: ``RuntimeError: no courier``; empty if it was not reported."""
        return ": ".join(each for each in (self.error_type, self.error_text) if each)

    @property
    def client(self) -> str:
        """The client on one line: its id, its address, and the host that ran the handler."""
        named = (self.client_id, self.address and f"address {self.address}", self.host and f"host {self.host}")
        return ", ".join(each for each in named if each)

    def or_else(self, other: FailureReason) -> FailureReason:
        """Return this reason, with empty texts filled from ``other``."""
        return FailureReason(*(mine or its for mine, its in zip(self, other, strict=True)))


def bounded(reason: FailureReason) -> FailureReason:
    """Return the reason with texts that are safe to store: non-printable characters escaped, each text cut to its
    bound.
    """
    return FailureReason(
        _bounded(reason.error_type, TYPE_BYTES_MAX),
        _bounded(reason.error_text, TEXT_BYTES_MAX),
        *(_bounded(each, NAME_BYTES_MAX) for each in reason[2:]),
    )


def _bounded(text: str, bytes_max: int) -> str:
    text = text[:bytes_max]  # cut before escaping: an escape is longer than its character
    if not text.isprintable():
        text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")
