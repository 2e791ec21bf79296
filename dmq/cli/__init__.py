"""The command ``dmq``: one module per noun.

Nothing here imports gRPC, pydantic, rich or RocksDB before a command needs it, so that ``dmq --help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return the exit code."""
    try:
        from dmq.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.stderr.write("dmq: the command line needs more than the library: pip install 'rock-dmq[server]'\n")
        return 1
    try:
        app(None if argv is None else list(argv), prog_name="dmq")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
