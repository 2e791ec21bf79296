"""The programs around the official Go and Java clients, built at their first use, or by ``make go-client java-client``.

What is built lies in ``.cache`` beside the source. A lock file lets one process build while others wait for it, and a
digest of the sources says whether what is there is still theirs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLIENTS = Path(__file__).parents[1] / "clients"
_BUILD_S_MAX = 400


@dataclass(frozen=True, slots=True)
class Build:
    """How one program is built: with which tools, from which files, by which command in its folder."""

    name: str
    tools: tuple[str, ...]
    sources: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def cache(self) -> Path:
        """Where the result lies."""
        return CLIENTS / self.name / ".cache"


GO = Build(
    "go",
    ("go",),
    ("client.go", "go.mod", "go.sum"),
    ("go", "build", "-mod=readonly", "-ldflags=-s -w", "-o", ".cache/client", "."),
)
JAVA = Build(
    "java",
    ("mvn", "javac", "java"),
    ("Client.java", "pom.xml"),
    ("mvn", "--quiet", "--batch-mode", "compiler:compile", "dependency:copy-dependencies"),
)
BUILDS = {build.name: build for build in (GO, JAVA)}


@cache
def what_is_missing(build: Build) -> str:
    """Build a program unless it is there, and return why it cannot run: nothing if it can."""
    for tool in build.tools:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    with _locked(build.cache):
        stamp, digest = build.cache / "stamp", _digest(build)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return ""
        stamp.unlink(missing_ok=True)
        try:
            built = subprocess.run(
                build.command,
                cwd=CLIENTS / build.name,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_BUILD_S_MAX,
            )
        except subprocess.TimeoutExpired:
            return f"the {build.name} client is not built within {_BUILD_S_MAX} s"
        if built.returncode:
            return f"the {build.name} client does not build: {(built.stderr + built.stdout).strip()[-2000:]}"
        stamp.write_text(digest, encoding="utf-8")
    return ""


def _digest(build: Build) -> str:
    digest = hashlib.sha256(" ".join(build.command).encode())
    for source in build.sources:
        digest.update((CLIENTS / build.name / source).read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(name: str) -> int:
    """Build one program for ``make``: what is missing is an error in CI, and a word elsewhere."""
    missing = what_is_missing(BUILDS[name])
    if not missing:
        return 0
    is_ci = bool(os.environ.get("CI"))
    print(
        f"make: required in CI: {missing}" if is_ci else f"{missing}: the tests with the {name} client will be skipped"
    )
    return int(is_ci)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
