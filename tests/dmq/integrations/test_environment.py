"""The hook as environment variables describe it: what each of them does, and what is said of one that cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dmq import Spool
from dmq.client import SidecarClient
from dmq.integrations import environment
from dmq.integrations.environment import hook_described_by, target_described_by
from retry import Delivered, EnvironmentInvalid, Redelivery, RetryPolicy, Table


def test_a_folder_is_enough(tmp_path: Path) -> None:
    """``DMQ_SPOOL`` alone makes a hook with the defaults, which sends."""
    with Redelivery.from_env({"DMQ_SPOOL": str(tmp_path)}) as hook:
        hook.add_handler("order", lambda payload: payload)
        assert isinstance(hook.send("order", b"1"), Delivered)
    assert list(tmp_path.glob("spool-*"))


def test_every_variable_counts(tmp_path: Path) -> None:
    """Each has its place in the hook, its policy or its spool; an empty one is not set."""
    sink, options = hook_described_by(
        {
            "DMQ_SPOOL": str(tmp_path),
            "DMQ_HOOK_MODE": "write_ahead",
            "DMQ_HOOK_WORKERS": "3",
            "DMQ_HOOK_DRAIN_PER_S": "50",
            "DMQ_HOOK_OLDEST_MAX": "10m",
            "DMQ_HOOK_KEEP_TIMEOUT": "2s",
            "DMQ_HOOK_CLOSE_TIMEOUT": "1500ms",
            "DMQ_HOOK_STEPS": "1s 1m",
            "DMQ_HOOK_MAX_ATTEMPTS": "9",
            "DMQ_HOOK_ENTRIES_MAX": "100",
            "DMQ_HOOK_BYTES_MAX": "64MiB",
            "DMQ_HOOK_OVERFLOW": "block",
            "DMQ_HOOK_BLOCK": "3s",
            "DMQ_HOOK_DURABILITY": "process",
            "DMQ_HOOK_TRAIL": "",
        }
    )
    assert isinstance(sink, Spool)
    sink.close()
    assert options == {
        "mode": "write_ahead",
        "workers_per_type": 3,
        "drain_per_s": 50.0,
        "oldest_max_s": 600.0,
        "keep_timeout_s": 2.0,
        "close_timeout_s": 1.5,
        "policy": RetryPolicy(backoff=Table((1_000, 60_000)), max_attempts=9, jitter=0.1),
    }
    assert (sink.options.entries_max, sink.options.bytes_max, sink.options.overflow) == (100, 2**26, "block")
    assert (sink.options.block_s, sink.options.durability, sink.options.trail_path) == (3.0, "process", None)


def test_steps_alone_set_the_repetition(tmp_path: Path) -> None:
    """One attempt at once and one after each step."""
    sink, options = hook_described_by({"DMQ_SPOOL": str(tmp_path), "DMQ_HOOK_STEPS": "1s 2s"})
    sink.close()
    assert options["policy"].max_attempts == 3


def test_an_argument_beats_its_variable(tmp_path: Path) -> None:
    """What the program says counts."""
    described = {"DMQ_SPOOL": str(tmp_path), "DMQ_HOOK_MODE": "write_ahead"}
    with Redelivery.from_env(described, mode="on_failure") as hook:
        assert hook.check().settings["mode"] == "on_failure"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no sink for the hook: set DMQ_SPOOL to a folder, or DMQ_ADDRESS or DMQ_CONTEXT"),
        ({"DMQ_HOOK_WORKER": "2"}, "DMQ_HOOK_WORKER is not a setting of the hook; known: DMQ_HOOK_BLOCK, "),
        ({"DMQ_HOOK_MODE": "safe"}, "DMQ_HOOK_MODE is 'safe': on_failure or write_ahead is expected"),
        ({"DMQ_HOOK_WORKERS": "65"}, "DMQ_HOOK_WORKERS is '65': a whole number from 1 to 64 is expected"),
        ({"DMQ_HOOK_WORKERS": "²"}, "DMQ_HOOK_WORKERS is '²': a whole number from 1 to 64 is expected"),
        ({"DMQ_HOOK_CLOSE_TIMEOUT": "soon"}, "DMQ_HOOK_CLOSE_TIMEOUT is 'soon': a duration is expected, such as 500ms"),
        (
            {"DMQ_HOOK_CLOSE_TIMEOUT": "0"},
            "DMQ_HOOK_CLOSE_TIMEOUT is '0': a duration longer than 0 and of a year at most",
        ),
        ({"DMQ_HOOK_KEEP_TIMEOUT": "366d"}, "DMQ_HOOK_KEEP_TIMEOUT is '366d': a duration longer than 0 and of a year"),
        ({"DMQ_HOOK_STEPS": "3s, 5s"}, "DMQ_HOOK_STEPS is '3s, 5s': durations separated by spaces are expected"),
        ({"DMQ_HOOK_STEPS": "900d"}, "DMQ_HOOK_STEPS is '900d': "),
        ({"DMQ_HOOK_BYTES_MAX": "1GB"}, "DMQ_HOOK_BYTES_MAX is '1GB': a size is expected, such as 512KiB"),
        ({"DMQ_HOOK_OVERFLOW": "drop"}, "DMQ_HOOK_OVERFLOW is 'drop': refuse, block, drop_newest or drop_oldest"),
        (
            {"DMQ_ADDRESS": "127.0.0.1:1", "DMQ_HOOK_BYTES_MAX": "1GiB"},
            "DMQ_HOOK_BYTES_MAX is '1GiB', but requires a spool: set DMQ_SPOOL to its folder",
        ),
        ({"DMQ_ADDRESS": "here"}, "DMQ_ADDRESS is 'here': host:port is expected, such as 127.0.0.1:8081"),
        (
            {"DMQ_ADDRESS": "127.0.0.1:1", "DMQ_ACCESS_KEY": "shop"},
            "there is no secret for access key shop: set DMQ_SEC",
        ),
        ({"DMQ_CONTEXT": "prod"}, "unknown context 'prod' in "),
    ],
)
def test_invalid_input_is_refused_by_its_name(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which variable, what it has, what is allowed; and no folder is left behind."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(EnvironmentInvalid) as refused:
        Redelivery.from_env(variables)
    assert str(refused.value).startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "value"), [("queue_max", 0), ("keep_timeout_s", 1e12), ("close_timeout_s", -1)])
def test_an_argument_that_cannot_be_leaves_no_spool_open(tmp_path: Path, option: str, value: float) -> None:
    """Its directory can be taken again at once."""
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{option} is "):
            Redelivery.from_env({"DMQ_SPOOL": str(tmp_path)}, **{option: value})
    assert len(list(tmp_path.glob("spool-*"))) == 1


def test_a_daemon_is_found_as_the_command_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its address, or by a context; of a context nothing counts beside an address."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "dmq" / "contexts.json"
    file.parent.mkdir()
    prod = {"address": "dmq.example:8081", "access_key": "shop", "secret": "s3cret"}
    file.write_text(json.dumps({"version": 1, "current": "prod", "contexts": {"prod": prod}}), encoding="utf-8")
    file.chmod(0o600)
    sink, _ = hook_described_by({"DMQ_CONTEXT": "prod"})
    assert isinstance(sink, SidecarClient)
    sink.close()
    assert sink.address == "dmq.example:8081"
    target = target_described_by({"DMQ_CONTEXT": "prod"})
    assert (target.access_key, target.secret) == ("shop", "s3cret")
    assert target_described_by({}).address == "dmq.example:8081"
    assert target_described_by({"DMQ_ADDRESS": "[::1]:8081"}) == target._replace(
        address="[::1]:8081", access_key="", secret=""
    )


def test_the_page_lists_every_variable() -> None:
    """And no other one of the hook."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bDMQ_HOOK_[A-Z_]*[A-Z]\b", page)) == {f"DMQ_HOOK_{each}" for each in environment._OWN}
