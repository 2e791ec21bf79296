"""What the metadata of the package says beside ``pyproject.toml``: URLs, and the README as an index shows it.

There a link that is relative leads nowhere, so each is made absolute when the package is built. Where the source lies
is said in one place, ``home`` of this hook in ``pyproject.toml``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_PAGES = {
    "Homepage": "",
    "Documentation": "/blob/main/docs/tutorial/index.md",
    "Source": "",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
}


def absolute(readme: str, home: str) -> str:
    """Return a page in Markdown with its relative links led to ``home``; pictures to the file itself."""

    def led(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        return f"{mark}[{text}]({home}/{'raw' if mark else 'blob'}/main/{target})"

    return _LINK.sub(led, readme)


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling, under this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what ``pyproject.toml`` calls dynamic."""
        home = str(self.config["home"])
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, home)}
        metadata["urls"] = {name: home + page for name, page in _PAGES.items()}
