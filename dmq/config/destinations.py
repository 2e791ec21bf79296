"""Destinations of notifications: a URL that receives webhooks, or a topic. They come from the configuration only."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_topic

_TOPIC = "topic:"
_PORTS = {"http": 80, "https": 443}
_EXPECTED = "expected none, topic:NAME, or a URL without credentials such as https://hooks.example/rock-dmq"


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """URL of a receiver. Its text leaves out the path, which may hold a token."""

    scheme: str  # http or https
    host: str
    port: int
    target: str  # path and query

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme == "https"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}/" + ("..." if self.target != "/" else "")


@dataclass(frozen=True, slots=True)
class NotificationTopic:
    """Topic that gets notifications as messages."""

    name: str

    def __str__(self) -> str:
        return _TOPIC + self.name


Destination = WebhookUrl | NotificationTopic


def parse_destination(text: str) -> Destination:
    """Return the destination that ``text`` names. Raise ``ValueError`` without the text, which may hold a token."""
    if text.startswith(_TOPIC):
        return NotificationTopic(_topic(text.removeprefix(_TOPIC)))
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(_EXPECTED) from None
    is_plain = text.isascii() and text.isprintable() and " " not in text and "@" not in parts.netloc
    if parts.scheme not in _PORTS or not host or not is_plain or parts.fragment:
        raise ValueError(_EXPECTED)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookUrl(parts.scheme, host, port or _PORTS[parts.scheme], target)


def _topic(name: str) -> str:
    try:
        check_topic(name)
    except Refused as refused:
        raise ValueError(str(refused)) from None
    if name.startswith((DEAD_LETTER_PREFIX, RETRY_PREFIX)):
        raise ValueError("a topic of its own is expected, not one of retries or dead letters")
    return name
