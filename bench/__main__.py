"""``python -m bench`` measures; ``python -m bench report`` writes the page from what is kept."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:
        from bench.report import app

        app(sys.argv[2:])
    else:
        from bench.cli import app

        app()
