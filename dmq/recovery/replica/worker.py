"""Process that uploads, prunes and verifies bases, so that none of it delays the daemon.

    python -m dmq.recovery.replica.worker base URL CHECKPOINT TIME_MS
    python -m dmq.recovery.replica.worker prune URL KEEP_FROM_MS NEEDS_VERIFIED
    python -m dmq.recovery.replica.worker verify URL DIRECTORY

It writes its result to stdout as JSON, and the reason of a failure to stderr. It ends with its parent, and when the
other end of its stdin is closed.
"""

from __future__ import annotations

import os
import shutil
import sys
from itertools import chain
from pathlib import Path

import msgspec

from dmq.errors import DmqError, ReplicaDamaged
from dmq.recovery.replica.results import UNAVAILABLE, Pruned, Verified
from dmq.replication.base import Uploaded, mark_verified, prune, upload
from dmq.replication.objects import ReplicaUnavailable, open_objects
from dmq.replication.restore import restore
from dmq.runtime.background import die_with_parent, end_with_stdin

_FAILED = 1
_NICE = 10


def verify(url: str, directory: Path) -> Verified:
    """Restore the newest state to the new ``directory``, check it, remove it, and mark the base as verified.

    Raise ``ReplicaDamaged`` if the restored store is not whole.
    """
    from dmq.recovery.check.check import check_store  # loads many modules, which an upload does not need

    os.nice(_NICE)
    objects = open_objects(url)
    try:
        restored = restore(objects, directory)
        size_bytes = sum(each.stat().st_size for each in restored.path.rglob("*") if each.is_file())
        findings = check_store(directory, lambda _: None).findings
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if findings.count:
        first = "; ".join(chain.from_iterable(findings.first.values()))
        raise ReplicaDamaged(f"a restore of {objects.url} has {findings.count.total():,} findings: {first}")
    if restored.base:
        mark_verified(objects, restored.base)
    return Verified(restored.base, size_bytes)


def main(arguments: list[str]) -> int:
    """Do the work that the arguments name, and return the exit code."""
    command, url, *rest = arguments
    result: Uploaded | Pruned | Verified
    try:
        if command == "base":
            result = upload(open_objects(url), Path(rest[0]), int(rest[1]))
        elif command == "prune":
            result = Pruned(prune(open_objects(url), int(rest[0]), needs_verified=rest[1] == "1"))
        else:
            result = verify(url, Path(rest[0]))
    except ReplicaUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return UNAVAILABLE
    except (DmqError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED
    sys.stdout.write(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    end_with_stdin()
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
