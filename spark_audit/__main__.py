"""``python -m spark_audit``."""

from __future__ import annotations

from spark_audit.cli import main

if __name__ == "__main__":
    main()
