"""``python -m bench``."""

from __future__ import annotations

from bench.cli import app

if __name__ == "__main__":
    app()
