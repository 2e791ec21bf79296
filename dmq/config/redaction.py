"""Rules of the setting ``redact``: message contents that operators see masked."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_*-]{1,255}")


class RedactionRule(NamedTuple):
    """Content that is masked in messages of the topics that ``pattern`` matches, as in the file of access keys.

    ``path`` are names of JSON fields in lower case, each directly inside of the one before. Arrays in between do not
    count. Without a path the whole body is hidden.
    """

    pattern: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join(filter(None, (self.pattern, ".".join(self.path))))


def parse_redaction_rule(text: str) -> RedactionRule:
    """Return the rule of ``customers*`` (whole bodies) or ``orders-*:card.number`` (a field)."""
    pattern, colon, path = (each.strip() for each in text.partition(":"))
    names = tuple(each.strip().casefold() for each in path.split("."))
    if not _PATTERN.fullmatch(pattern) or (colon and not all(each and each.isprintable() for each in names)):
        raise ValueError(
            f"{text!r:.80} is not a rule; expected TOPIC, to hide its bodies, or TOPIC:FIELD, for example "
            "orders-*:card.number"
        )
    return RedactionRule(pattern, names if colon else ())
