"""The report people look at: one HTML file with everything in it, drawn from ``report.json`` and the findings.

``html.write_html`` is the way in. ``markup`` escapes, ``text`` puts numbers and times into words, ``windows`` merges
windows for drawing, ``chart`` draws axes; every picture has a module of its own; ``html`` puts the page together.
"""

from __future__ import annotations
