"""HTML report: one self-contained file, generated from ``report.json`` and the findings.

``html.write_html`` is the entry point. Each section has a module in ``sections``, which computes its content, and a
template in ``templates``, which renders it. ``windows`` merges windows for drawing and ``chart`` draws. ``table`` and
``look`` hold tables and legends; ``text`` formats numbers and times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_audit.report import html, summary, text  # noqa: TC004 - a namespace, loaded at its first import

__all__ = ["html", "summary", "text"]
