"""The report people look at: one HTML file with everything in it, drawn from ``report.json`` and the findings.

``html.write_html`` is the way in. Every section has a module, which works out what is said in it, and a template in
``templates``, which says it. ``windows`` merges windows for drawing, ``chart`` draws, ``table`` and ``look`` are what
tables and legends are made of, ``text`` puts numbers and times into words.
"""

from __future__ import annotations
