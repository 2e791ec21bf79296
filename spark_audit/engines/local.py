"""Local files, for both engines, and the column types of Parquet files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from spark_audit.schema import TRAIL_VERSION, Fields

_HIDDEN = re.compile(r"/[._][^/]*(?:/|$)|\.tmp(?:/|$)")
_PARQUET = {"bigint": "int64", "int": "int32", "string": "binary (STRING)", "binary": "binary", "boolean": "boolean"}


def is_hidden(path: str) -> bool:
    """Return True if the file at this path of a trail is not part of it."""
    return _HIDDEN.search("/" + path) is not None


def walk_folder(folder: Path) -> list[tuple[str, int]]:
    """Return all visible files with their sizes, sorted."""
    found = [(str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*") if path.is_file()]
    return sorted(each for each in found if not is_hidden(each[0]))


def read_texts(folder: Path, paths: Sequence[str]) -> dict[str, str]:
    """Return the contents of files by path. Files that cannot be read are left out."""
    found: dict[str, str] = {}
    for path in paths:
        with suppress(OSError):
            found[path] = (folder / path).read_text(encoding="utf-8", errors="replace")
    return found


def plain(url: str) -> str:
    """Return a normal form of a URL, equal for ``file:/a``, ``file:///a`` and their escaped forms."""
    return re.sub(r"^([a-z0-9]+):/*", r"\1:/", unquote(url))


def version_fault(version: str | None) -> str:
    """Return the reason why a file of this version cannot be read; empty if it can."""
    return "" if version in {None, str(TRAIL_VERSION)} else f"of version {version!a}, not {TRAIL_VERSION}"


def type_fault(types: Mapping[str, str], fields: Fields) -> str:
    """Describe the first column that is missing or has another type than in ``fields``; empty if there is none."""
    for name, kind in fields:
        wanted = _PARQUET.get(kind, "group (LIST)")
        if name not in types:
            return f"column {name} is missing"
        if types[name] != wanted:
            return f"column {name} is {types[name]}, not {wanted}"
    return ""
