"""The command line as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# What `--help` must not load: together they are most of a second on a slow machine.
HEAVY = ("rich", "grpc", "google.protobuf", "pydantic", "rocksdict", "structlog", "prometheus_client", "uvloop")


def dmq(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dmq", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--help"], []),
        (["--version"], []),
        # typer itself loads pydantic as soon as it reads the parameters of the root
        (["serve", "--help"], ["pydantic"]),
        (["msg", "send", "--help"], ["pydantic"]),
        (["group", "set-policy", "--help"], ["pydantic"]),
        (["retry", "run-now", "--help"], ["pydantic"]),
        (["dead", "redrive", "--help"], ["pydantic"]),
        (["backoff", "simulate", "--help"], ["pydantic"]),
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str], needed: list[str]) -> None:
    """That is what keeps it quick; measured by modules, because seconds depend on the machine."""
    code = (
        "import sys; from dmq.cli import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], code, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == f"{needed} 0\n"
    assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [(["--help"], []), (["--version"], []), (["status", "--help"], ["status"]), (["msg", "send", "--help"], ["msg"])],
)
def test_a_command_imports_its_own_module_alone(arguments: list[str], imported: list[str]) -> None:
    """However many there are, each is as quick as if it were the only one."""
    code = (
        "import sys; from dmq.cli import main; code = main(sys.argv[1:]); from dmq.cli.nouns import NOUNS, module_of;"
        "print([name for name in NOUNS if module_of(name) in sys.modules], code, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == f"{imported} 0\n"


def test_importing_the_package_is_cheap() -> None:
    """An application that imports `dmq` for the hook pays for nothing else."""
    code = f"import sys, dmq; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == "[]\n"


def test_without_a_daemon() -> None:
    """Exit code 6 and one line, for people and for programs; nothing on stdout."""
    result = dmq("--address", "127.0.0.1:1", "status")
    assert (result.returncode, result.stdout) == (6, "")
    assert result.stderr == "dmq: no daemon answers at 127.0.0.1:1; is `dmq serve` running?\n"
    result = dmq("--address", "127.0.0.1:1", "status", "-o", "json")
    assert (result.returncode, json.loads(result.stderr)["error"]["exit_code"]) == (6, 6)


def test_usage_errors() -> None:
    """Exit code 2 and one line that says where to look."""
    result = dmq("msg", "send", "orders")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "dmq: Missing argument 'BODY'; see 'dmq msg send --help'\n"


def test_serve_with_a_wrong_configuration(tmp_path: Path) -> None:
    """A line of the log for programs, of each fault a line for people; nothing is left behind."""
    arguments = ("serve", "--listen", "x", "--metrics-listen", "y")
    result = dmq(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    line = json.loads(result.stderr)
    assert (line["event"], line["code"]) == ("start_failed", 2)
    assert line["error"].startswith("--listen: ")
    assert "; --metrics-listen: " in line["error"]
    result = dmq(*arguments, "--log-format", "console", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == ["--listen", "--metrics-listen"]
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_left_is_no_traceback() -> None:
    """`dmq ... | head` closes the pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "dmq", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        process.wait(30)


def test_without_the_server_extra() -> None:
    """The library alone has the command, too; it says what to install."""
    code = "import sys; sys.modules['typer'] = None; from dmq.cli import main; sys.exit(main(['status']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "dmq: the command dmq needs typer, which is missing: pip install 'rock-dmq[server]'\n"
