"""Host names in the headers of HTTP requests."""

from __future__ import annotations

import re
from typing import Final

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]*))(?::[0-9]{1,5})?", re.ASCII)


def host_of(header: str) -> str | None:
    """Return the name or address in the header ``Host``, without port and brackets; None if it is invalid."""
    found = _HOST.fullmatch(header)
    return None if found is None else found[1] or found[2]


def is_origin_of(origin: str, host: str) -> bool:
    """Return True if the header ``Origin`` names the site of the header ``Host``, by any scheme."""
    return origin.partition("://")[2] == host
