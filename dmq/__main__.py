"""``python -m dmq`` is the command ``dmq``."""

from __future__ import annotations

import sys

from dmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
