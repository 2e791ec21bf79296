"""The command ``dmq``: one module per noun.

No module here imports gRPC, pydantic, rich or RocksDB before a command needs it, so that ``dmq --help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from broker_adapter.runtime.extras import ExtraMissing, require


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return the exit code."""
    try:
        require("the command dmq", "server", "typer")
    except ExtraMissing as error:
        sys.stderr.write(f"dmq: {error}\n")
        return 1
    from dmq.cli.app import app

    try:
        app(None if argv is None else list(argv), prog_name="dmq")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
