"""The load generator as a process: the Go program, built when it is first needed, or the Python one in its place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.place import BUILD

SOURCE = Path(__file__).parent / "load"
_SECONDS_MAX = 1800

Action = Literal["send", "receive", "wake"]


class LoadFailed(Exception):
    """The load generator did not do its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A generator. ``is_native`` is False for the one that is a limit itself."""

    command: tuple[str, ...]
    is_native: bool

    def run(self, action: Action, **options: object) -> dict[str, Any]:
        """Run it to its end and return what it found."""
        return self.start(action, **options).result()

    def start(self, action: Action, **options: object) -> Running:
        """Start it; a name such as ``in_flight`` is the option ``--in-flight``."""
        arguments = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in options.items()]
        return Running(
            subprocess.Popen(
                [*self.command, action, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )


@dataclass(frozen=True, slots=True)
class Running:
    """A generator at work."""

    process: subprocess.Popen[str]

    def result(self) -> dict[str, Any]:
        """Wait for its end; raises LoadFailed."""
        out, err = self.process.communicate(timeout=_SECONDS_MAX)
        if self.process.returncode:
            raise LoadFailed(err.strip())
        found: dict[str, Any] = json.loads(out)
        return found

    def end(self) -> None:
        """End it if it still runs: what it was to be measured against has failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def generator(kind: Literal["go", "python"]) -> Load:
    """Return the generator asked for; raises LoadFailed if the Go one cannot be built."""
    if kind == "python":
        return Load(command=(sys.executable, "-m", "bench.load_python"), is_native=False)
    go = shutil.which("go")
    if go is None:
        raise LoadFailed("Go is not here")
    BUILD.mkdir(parents=True, exist_ok=True)
    program = BUILD / "load"
    built = subprocess.run(
        [go, "build", "-o", str(program), "."], cwd=SOURCE, capture_output=True, text=True, check=False
    )
    if built.returncode:
        raise LoadFailed(f"the Go load generator does not build: {built.stderr.strip()}")
    return Load(command=(str(program),), is_native=True)


def check(found: dict[str, Any], *, allowed: tuple[str, ...] = ("20000",)) -> None:
    """Refuse a result in which anything failed: a fast error is no speed. Raises LoadFailed."""
    wrong = {code: count for code, count in found["codes"].items() if code not in allowed}
    if wrong or not found["codes"]:
        raise LoadFailed(f"calls were not answered OK: {wrong or 'none was answered'}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
