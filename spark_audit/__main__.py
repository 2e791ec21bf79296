"""``python -m spark_audit``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from spark_audit.cli import main
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("spark_audit: typer is missing: pip install 'rock-dmq[audit]'")
    main()
