"""Files next to the database that identify it and record how it was closed.

CELL       JSON: format_version, cell_id, and is_copy in a copy that was never opened
CLOSED     JSON: files, the names and sizes of the database's
HOLDERS    JSON: inode, its own, and holders, the ids under which the last processes may hold the replica's lease
ADOPTER    in a producer store's directory: the name of the directory that adopts its entries
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dmq.store.schema import keys

CELL_FILE, CLOSED_FILE, HOLDERS_FILE, ADOPTER_FILE = "CELL", "CLOSED", "HOLDERS", "ADOPTER"


class Marker(NamedTuple):
    """Content of ``CELL``: identifies the cell of a directory."""

    cell_id: str
    is_copy: bool
    format_version: int = keys.FORMAT_VERSION


def encode_marker(marker: Marker) -> str:
    """Return the text of ``CELL``."""
    plain: dict[str, object] = {"format_version": marker.format_version, "cell_id": marker.cell_id}
    return json.dumps(plain | {"is_copy": True} if marker.is_copy else plain)


def decode_marker(text: str) -> Marker:
    """Decode the text of ``CELL``; raise ``ValueError`` if it is invalid."""
    try:
        plain = json.loads(text)
        return Marker(str(plain["cell_id"]), bool(plain.get("is_copy", False)), int(plain["format_version"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def encode_closed(files: Mapping[str, int]) -> str:
    """Return the text of ``CLOSED`` for the file sizes by name."""
    return json.dumps({"files": files})


def decode_closed(text: str) -> dict[str, int]:
    """Decode the text of ``CLOSED``; raise ``ValueError`` if it is invalid."""
    try:
        return dict(json.loads(text)["files"])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error


def encode_holders(holders: Sequence[str], inode: int) -> str:
    """Return the text of ``HOLDERS`` for the ids, oldest first; the file has this inode number."""
    return json.dumps({"inode": inode, "holders": holders})


def decode_holders(text: str, inode: int) -> list[str]:
    """Decode the text of ``HOLDERS``. A copy, which has another inode number, has no ids.

    Raise ``ValueError`` if the text is invalid.
    """
    try:
        plain = json.loads(text)
        return [str(each) for each in plain["holders"]] if plain["inode"] == inode else []
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
