"""A shell's completion against a real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, run_command

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_topics_groups_and_contexts(tmp_path: Path, shell: str) -> None:
    """Of the daemon and of the file of contexts; nothing, and no error, if no daemon answers."""
    with Daemon(tmp_path / "data", processes=1) as daemon:
        env = {"DMQ_ADDRESS": daemon.address, "XDG_CONFIG_HOME": str(tmp_path)}
        for command in ("topic create orders", "topic create refunds", "group create billing"):
            assert run_command(*command.split(), env=env).returncode == 0
        assert run_command("context", "add", "production", "--address", daemon.address, env=env).returncode == 0
        assert completed("topic show o", env, shell) == ["orders"]
        assert completed("msg ls ", env, shell) == ["orders", "refunds"]
        assert completed("msg send o", env, shell) == ["orders"]
        assert completed("msg recall o", env, shell) == ["orders"]
        assert completed("dead ls b", env, shell) == ["billing"]
        assert completed("context use p", env, shell) == ["production"]
        assert completed("--context p", env, shell) == ["production"]
    assert completed("topic show o", env, shell) == []


def completed(line: str, env: dict[str, str], shell: str) -> list[str]:
    words = ["dmq", *line.split(" ")]
    asked = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
    }[shell]
    done = run_command(env={**env, **asked, "_DMQ_COMPLETE": f"complete_{shell}"})
    assert done.stderr == ""
    found = done.stdout.replace("_arguments '*: :((", "").replace("))'", "")
    return sorted(word.strip('"') for word in found.split() if word.strip('"') and word != "_files")
