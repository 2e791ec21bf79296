"""A daemon of the next store format: ``python newer_daemon.py python -m dmq serve ...``, a prefix like ``strace``."""

from __future__ import annotations

import sys

from dmq.cli import main
from dmq.store.schema.keys import FORMAT_VERSION

if __name__ == "__main__":
    for module in list(sys.modules.values()):  # those that are imported later read it from the first one
        if hasattr(module, "FORMAT_VERSION") and module.__name__ != "__main__":
            vars(module)["FORMAT_VERSION"] = FORMAT_VERSION + 1
    sys.argv = ["dmq", *sys.argv[sys.argv.index("serve") :]]
    sys.exit(main())
