"""The programs around the official Go, Java and Rust clients, built at their first use, or by ``make go-client ...``.

What is built lies in ``.cache`` beside the source, around an earlier version of a client in a folder of its own there.
A lock file lets one process build while others wait for it, and a digest of the sources says whether what is there is
still theirs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLIENTS = Path(__file__).parents[3] / "clients"
_BUILD_S_MAX = 400


@dataclass(frozen=True, slots=True)
class Build:
    """How one program is built: with which tools, from which files, by which command in its folder.

    ``prepare`` comes before the command, and may raise what ``subprocess.run`` does. Where a program that is not
    ``is_required`` cannot be built, its tests are skipped by name, in CI too.
    """

    name: str
    tools: tuple[str, ...]
    sources: tuple[str, ...]
    command: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None
    is_required: bool = True
    version: str = ""  # of the client; empty: the newest

    @property
    def title(self) -> str:
        """What it is called where it cannot be built."""
        return f"{self.name} {self.version}".strip()

    @property
    def cache(self) -> Path:
        """Where the result lies."""
        return CLIENTS / self.name / ".cache" / self.version


_GO_SOURCES = ("client.go", "push.go", "push_before_5_1_3.go", "recall.go", "recall_before_5_1_4.go")
GO = Build(
    "go",
    ("go",),
    (*_GO_SOURCES, "go.mod", "go.sum"),
    ("go", "build", "-mod=readonly", "-ldflags=-s -w", "-o", ".cache/client", "."),
)
JAVA = Build(
    "java",
    ("mvn", "javac", "java"),
    ("Client.java", "pom.xml"),
    ("mvn", "--quiet", "--batch-mode", "compiler:compile", "dependency:copy-dependencies"),
)


def _name_the_registry(folder: Path) -> None:
    """Write ``Cargo.lock`` from ``Cargo.lock.in``, where the line that names the registry was left out of each package.

    Cargo wants it back, with its own word for the registry. The hashes are in the file that is kept.
    """
    asked = ("cargo", "metadata", "--no-deps", "--format-version", "1")
    told = json.loads(_run(asked, folder, within_s=60))
    (source,) = {each["source"] for package in told["packages"] for each in package["dependencies"]}
    lock = (folder / "Cargo.lock.in").read_text(encoding="utf-8")
    lock = re.sub(r"^checksum = ", f'source = "{source}"\nchecksum = ', lock, flags=re.MULTILINE)
    (folder / "Cargo.lock").write_text(lock, encoding="utf-8")


RUST = Build(
    "rust",
    ("cargo",),
    ("src/main.rs", "Cargo.toml", "Cargo.lock.in"),
    ("cargo", "build", "--locked", "--quiet", "--target-dir", ".cache"),
    prepare=_name_the_registry,
    is_required=False,
)
VERSITYGW = Build(
    "versitygw",  # no client: an object store, for replication
    ("go",),
    ("go.mod", "go.sum"),
    (*GO.command[:4], "-o", ".cache/versitygw", "github.com/versity/versitygw/cmd/versitygw"),
)
OTELCOL = Build(
    "otelcol",  # no client: an OpenTelemetry collector, for traces
    ("go",),
    ("main.go", "go.mod", "go.sum"),
    (*GO.command[:4], "-o", ".cache/collector", "."),
    is_required=False,
)
BUILDS = {build.name: build for build in (GO, JAVA, RUST, VERSITYGW, OTELCOL)}


def earlier_go(version: str, *tags: str) -> Build:
    """Return how the program is built around an earlier Go client: with what the newest needs, and its own hashes."""
    cache = f".cache/{version}"

    def prepare(folder: Path) -> None:
        asked = (folder / "go.mod").read_text(encoding="utf-8")
        asked = re.sub(r"(clients/golang/v5) \S+", rf"\1 {version}", asked)
        (folder / cache / "go.mod").write_text(asked, encoding="utf-8")
        hashes = "".join((folder / name).read_text(encoding="utf-8") for name in ("go.sum", "versions.sum"))
        (folder / cache / "go.sum").write_text(hashes, encoding="utf-8")

    command = ("go", "build", "-mod=readonly", f"-modfile={cache}/go.mod", f"-tags={','.join(tags)}", "-ldflags=-s -w")
    sources = (*GO.sources, "versions.sum")
    return Build("go", GO.tools, sources, (*command, "-o", f"{cache}/client", "."), prepare, version=version)


def earlier_java(version: str) -> Build:
    """Return how the program is built around an earlier Java client."""
    folder = f"-Dclient.build={CLIENTS / 'java' / '.cache' / version}"
    command = (*JAVA.command[:3], f"-Dclient.version={version}", folder, *JAVA.command[3:])
    return Build("java", JAVA.tools, JAVA.sources, command, version=version)


def earlier_python(version: str) -> Build:
    """Return how an earlier Python client is installed; what it needs is there, since the newest needs it as well."""
    cache = f".cache/{version}"

    def prepare(folder: Path) -> None:
        known = (folder / "versions.txt").read_text(encoding="utf-8").splitlines()
        (line,) = (each for each in known if each.startswith(f"rocketmq-python-client=={version} "))
        (folder / cache / "asked.txt").write_text(line + "\n", encoding="utf-8")

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install", "--no-deps")
    where = ("--upgrade", "--target", f"{cache}/lib", "-r", f"{cache}/asked.txt")
    return Build("python", (), ("versions.txt",), (*pip, "--require-hashes", *where), prepare, version=version)


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
            build.prepare(CLIENTS / build.name)
            _run(build.command, CLIENTS / build.name, within_s=_BUILD_S_MAX)
        except subprocess.TimeoutExpired as late:
            return f"the {build.title} client is not built within {late.timeout} s"
        except subprocess.CalledProcessError as failed:
            return f"the {build.title} client does not build: {(failed.stderr + failed.stdout).strip()[-2000:]}"
        stamp.write_text(digest, encoding="utf-8")
    return ""


def _run(command: tuple[str, ...], folder: Path, *, within_s: float) -> str:
    """Return what the command printed; raises if it fails, or takes longer."""
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=within_s,
    ).stdout


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
    """Build one program for ``make``: what is missing and required is an error in CI, and a word elsewhere."""
    missing = what_is_missing(BUILDS[name])
    if not missing:
        return 0
    is_error = bool(os.environ.get("CI")) and BUILDS[name].is_required
    told = f"make: required in CI: {missing}" if is_error else f"{missing}: its tests will be skipped"
    print(told)
    return int(is_error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
