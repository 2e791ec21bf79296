"""Our wheel and PyPI's ``retry`` in one environment: both have a package of that name, and the last one wins."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
# The layout of retry 0.9.2: what it holds does not matter, where it lies does.
_THEIRS = {
    "retry/__init__.py": "from .api import retry\n",
    "retry/api.py": "from retry.compat import decorator\ndef retry(): return 'theirs'\ndef retry_call(f): return f()\n",
    "retry/compat.py": "def decorator(caller): return caller\n",
    "retry/tests/__init__.py": "",
    "retry-0.9.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: retry\nVersion: 0.9.2\n",
    "retry-0.9.2.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
_USES = "from retry import retry; from retry.api import retry_call; print(retry_call(lambda: 'kept', **{}))"
_OURS = (
    "import dmq; from retry import RetryPolicy, retry; from retry.policy import decide; print(retry(tries=3)(str)())"
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels."""
    target = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    record = "retry-0.9.2.dist-info/RECORD"
    lines = [f"{name},sha256={_hash(text)},{len(text)}" for name, text in _THEIRS.items()]
    with zipfile.ZipFile(target / "retry-0.9.2-py3-none-any.whl", "w") as made:
        for name, text in {**_THEIRS, record: "\n".join([*lines, f"{record},,", ""])}.items():
            made.writestr(name, text)
    return target


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Environment:
    """A new environment without packages, into which pip puts some of the folder's."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self._wheels = wheels

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        options = (
            ["--no-index", "--no-compile", f"--find-links={self._wheels}"] if arguments[0] == "install" else ["-y"]
        )
        subprocess.run([*command, *options], check=True, capture_output=True, timeout=100, cwd=self.python.parent)

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(self.python), "-c", code]
        elsewhere = self.python.parent  # not where our source lies
        return subprocess.run(command, env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False)

    def serves_both(self) -> None:
        """Assert that users of either package find what they use."""
        assert self.run(_USES).stdout == "kept\n"
        ours = self.run(_OURS)
        assert (ours.stdout, ours.returncode) == ("\n", 0), ours.stderr

    def says(self) -> str:
        """Import dmq, which fails, and return the line that says why."""
        done = self.run("import dmq")
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
        return line


def test_both_orders(wheels: Path, tmp_path: Path) -> None:
    """Ours last: whoever used theirs goes on working. Theirs last, or removed: dmq says so, and what mends it."""
    there = Environment(tmp_path / "env", wheels)
    there.pip("install", "--no-deps", "retry")
    there.pip("install", "--no-deps", "rock-dmq")
    there.serves_both()
    there.pip("install", "--no-deps", "--force-reinstall", "retry")
    assert there.run(_USES).stdout == "kept\n"
    told = re.search(r"fix it with: pip (install [\w -]+?) \(", there.says())
    assert told is not None
    there.pip(*told[1].split())
    there.serves_both()
    there.pip("uninstall", "retry")
    assert told[1] in there.says()
