"""Files beside the database, which say what it is and how it was left.

CELL       JSON: format_version, cell_id, and is_copy of a copy that nobody opened yet
CLOSED     JSON: files, the names and sizes of the database's
ADOPTER    of a directory of a spool: the name of the one it is moved to
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from dmq.store.schema import keys

CELL_FILE, CLOSED_FILE, ADOPTER_FILE = "CELL", "CLOSED", "ADOPTER"


class Marker(NamedTuple):
    """Which cell a directory is."""

    cell_id: str
    is_copy: bool
    format_version: int = keys.FORMAT_VERSION


def encode_marker(marker: Marker) -> str:
    """Return the text of ``CELL``."""
    plain: dict[str, object] = {"format_version": marker.format_version, "cell_id": marker.cell_id}
    return json.dumps(plain | {"is_copy": True} if marker.is_copy else plain)


def decode_marker(text: str) -> Marker:
    """Undo ``encode_marker``; raises ``ValueError`` if it cannot be one."""
    try:
        plain = json.loads(text)
        return Marker(str(plain["cell_id"]), bool(plain.get("is_copy", False)), int(plain["format_version"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def encode_closed(files: Mapping[str, int]) -> str:
    """Return the text of ``CLOSED``, with the sizes of files by name."""
    return json.dumps({"files": files})


def decode_closed(text: str) -> dict[str, int]:
    """Undo ``encode_closed``; raises ``ValueError`` if it cannot be one."""
    try:
        return dict(json.loads(text)["files"])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
