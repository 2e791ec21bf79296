"""What a producer sent, as facts for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmq.cli import output as out

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


def content_facts(content: wire.Content) -> list[tuple[str, str]]:
    """Return one fact per field, in the order a person asks; the body only if it is there."""
    encoding = f", {content.body_encoding.lower()}" if content.body_encoding != "IDENTITY" else ""
    return [
        ("tag", content.tag),
        ("keys", " ".join(content.keys)),
        ("message group", content.message_group),
        ("properties", " ".join(f"{name}={value}" for name, value in sorted(content.properties.items()))),
        ("born", " on ".join(filter(None, (out.when(content.born_at_ms), content.born_host)))),
        ("body size", f"{content.body_bytes} B{encoding}"),
        ("body", out.body_text(content.body) if content.HasField("body") else ""),
    ]
