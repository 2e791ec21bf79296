"""What the site of the documentation shows beside ``docs``: pages from the root of the repository, and the reference.

A hook of mkdocs. Links between pages are written for whoever reads the repository; here they are turned into those of
the site, and links to source files, which the site does not have, into their text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# by where they are in the repository
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY_POLICY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/README.md": "examples/index.md",
    "dmq/http2/README.md": "http2.md",
}
REFERENCE = {
    "reference/api/hook.md": (
        "The hook",
        "retry.hook.redelivery.Redelivery",
        "retry.hook.producers.durable_producer.durable",
        "retry.outcome",
    ),
    "reference/api/sinks.md": ("Sinks", "dmq.producer_store.spool", "dmq.client.SidecarClient", "retry.sink"),
    "reference/api/policies.md": ("Retry policies", "retry.policy", "retry.flow", "retry.hook.verdicts.verdict"),
    "reference/api/broker.md": (
        "Brokers",
        "broker_adapter.contracts.adapter",
        "broker_adapter.contracts.message",
        "broker_adapter.contracts.errors",
    ),
    "reference/api/testing.md": ("Testing with the hook", "retry.testing"),
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs``."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, (title, *names) in REFERENCE.items():
        files.append(File.generated(config, page, content="\n\n".join([f"# {title}", *(f"::: {n}" for n in names)])))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Turn the links of the repository into those of the site."""
    site = page.file.src_uri
    here = next((path for path, name in PAGES.items() if name == site), f"docs/{site}")

    def to_site(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says that it is broken
        if (ROOT / path / "README.md").exists():
            path += "/README.md"
        name = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        return f"{mark}[{text}]({posixpath.relpath(name, posixpath.dirname(site) or '.')}{anchor or ''})"

    return _LINK.sub(to_site, markdown)
