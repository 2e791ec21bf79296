"""Our programs around RocketMQ's own classic client, compiled into ``build/bench`` as long as nothing changes."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from support.clients.java.jvm import SHORT_LIVED

from bench.place import BUILD
from bench.rocketmq import artifacts

_SOURCES = sorted(Path(__file__).parent.glob("*.java"))
_COMPILE_S_MAX = 300


@cache
def class_path() -> str:
    """Return the class path of all programs; raises ``PeerMissing`` where RocketMQ cannot be had."""
    libraries = f"{artifacts()}/*"
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in _SOURCES)).hexdigest()
    classes = BUILD / f"programs-{digest[:16]}"
    if not classes.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / "classes"
            made.mkdir()
            quick = ("-proc:none", *(f"-J{option}" for option in SHORT_LIVED))
            subprocess.run(
                ["javac", *quick, "-encoding", "UTF-8", "-d", str(made), "-cp", libraries, *map(str, _SOURCES)],
                check=True,
                capture_output=True,
                timeout=_COMPILE_S_MAX,
            )
            with suppress(OSError):  # another worker was quicker
                made.rename(classes)
    return f"{classes}:{libraries}"
