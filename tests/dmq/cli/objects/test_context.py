"""``dmq context``, and which context counts for a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmq.cli.app import app
from dmq.config.contexts import load


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration folder of this test's own, and an environment that says nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DMQ_CONTEXT", "DMQ_ADDRESS", "DMQ_ACCESS_KEY", "DMQ_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str, given: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), input=given)
    assert result.exit_code == code, result.output
    assert "s3cret" not in result.output
    return result.output


def what_counts(*options: str) -> dict[str, tuple[str, str]]:
    found = json.loads(run("-o", "json", *options, "context", "show"))
    return {name: (each["value"], each["source"]) for name, each in found.items()}


def test_add_show_use_and_remove() -> None:
    """The first is the current one; ``use`` changes that; a secret comes from a pipe and is never printed."""
    run("context", "add", "prod", "--address", "prod:1", "--access-key", "ops", given="s3cret\n")
    run("context", "add", "test", "--address", "test:1", "--tls")
    assert load().get("prod").secret == "s3cret"
    assert what_counts()["address"] == ("prod:1", "context prod")
    assert what_counts()["secret"] == ("stored", "context prod")
    assert "* " in run("context", "ls")
    run("context", "use", "test")
    assert what_counts() == {"address": ("test:1", "context test"), "tls": ("true", "context test")}
    assert "exists; use --replace" in run("context", "add", "prod", "--address", "other:1", code=2)
    run("context", "add", "prod", "--replace", "--address", "other:1")
    run("context", "rm", "test")
    assert what_counts() == {"address": ("127.0.0.1:8081", "default")}
    for command in ("use", "rm", "show"):
        run("context", command, "nope", code=3)


def test_sources_and_their_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Option, then environment, then context, then default; a context that an option names beats the environment."""
    run("context", "add", "prod", "--address", "prod:1", "--access-key", "ops", given="s3cret\n")
    monkeypatch.setenv("DMQ_ADDRESS", "env:1")
    assert what_counts() == {"address": ("env:1", "environment")}, "not with the key of another daemon"
    assert what_counts("--context", "prod")["address"] == ("prod:1", "context prod")
    both = what_counts("--context", "prod", "--address", "opt:1")
    assert (both["address"], both["access_key"]) == (("opt:1", "option"), ("ops", "context prod"))
    monkeypatch.delenv("DMQ_ADDRESS")
    monkeypatch.setenv("DMQ_CONTEXT", "nope")
    assert "known: prod" in run("status", code=2)
    assert what_counts("--context", "")["address"] == ("127.0.0.1:8081", "default")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a b",), "letters"),
        (("p", "--address", "x"), "--address"),
        (("p", "--tls-ca", "/no/such.pem"), "an existing file"),
        (("p", "--secret-file", "/dev/null"), "--access-key"),
        (("p", "--access-key", "ops"), "no secret was given"),
    ],
)
def test_unusable_values_are_not_kept(arguments: tuple[str, ...], said: str) -> None:
    """A usage error that names what is wrong; no file is made."""
    assert said in run("context", "add", *arguments, given="", code=2)
    assert not load().by_name


@pytest.mark.parametrize("arguments", [("context", "ls"), ("context", "use", "x"), ("status",)])
def test_a_broken_file_is_a_wrong_configuration(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever asks for it ends with the same code."""
    file = tmp_path / "config" / "dmq" / "contexts.json"
    file.parent.mkdir(parents=True)
    file.write_text("{", encoding="utf-8")
    file.chmod(0o600)
    assert f"the file of contexts {file} cannot be used: no JSON" in run(*arguments, code=2)


@pytest.mark.parametrize("key", ["schlüssel", "a\nb"])
def test_an_access_key_that_no_header_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked, as a wrong configuration."""
    monkeypatch.setenv("DMQ_ACCESS_KEY", key)
    monkeypatch.setenv("DMQ_SECRET_KEY", "s3cret")
    assert "expected printable ASCII characters" in run("status", code=2)
