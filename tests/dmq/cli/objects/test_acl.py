"""``dmq acl``, and how the command line signs: what is printed, and that no secret is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from support.rigs.commands.fake_admin_client import install
from support.rigs.commands.fake_admin_client import run_dmq as run
from support.rigs.daemon.acl import KEYS, OPERATOR, write_acl

from broker_adapter.wire.signature import signature_of
from dmq.acl.file import parse
from dmq.acl.signature import claim_of


@pytest.fixture(autouse=True)
def acl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of access keys, configured as the daemon's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMQ_ACL", "acl.toml")
    return write_acl(tmp_path)


def test_ls_shows_keys_and_rules_without_secrets() -> None:
    """A line for each rule; for programs a list with stable keys."""
    shown = run("acl", "ls")
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["ACCESS", "KEY", "ROLE", "RULE"],
        ["shop", "topic", "orders*", "=", "PUB|SUB"],
        ["group", "billing*", "=", "SUB"],
        ["reader", "topic", "orders*", "=", "SUB"],
        ["group", "reading*", "=", "SUB"],
        ["hook", "topic", "redelivery_*", "=", "PUB|SUB"],
        ["topic", "%DLQ%redelivery-notes", "=", "PUB"],
        ["group", "redelivery", "=", "ADMIN|SUB"],
        ["group", "redelivery-notes", "=", "ADMIN"],
        ["operator", "admin"],
    ]
    found = run("acl", "ls", "-o", "json").stdout
    assert json.loads(found)[1] == {
        "access_key": "reader",
        "is_admin": False,
        "role": "",
        "with_bodies": False,
        "rules": [
            {"kind": "topic", "pattern": "orders*", "actions": ["SUB"]},
            {"kind": "group", "pattern": "reading*", "actions": ["SUB"]},
        ],
    }
    assert not any(key.secret_key in shown.stdout + found for key in KEYS)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("shop", "PUB", "topic:orders-eu"), 0, "allowed by topic orders* = PUB|SUB"),
        (("shop", "SUB", "group:billing"), 0, "allowed by group billing* = SUB"),
        (("shop", "SUB", "topic:%DLQ%billing"), 5, "not allowed: no rule gives SUB on topic '%DLQ%billing'"),
        (("reader", "PUB", "topic:orders"), 5, "not allowed: no rule gives PUB on topic 'orders'"),
        (("operator", "ADMIN", "group:billing"), 0, "allowed: it is an admin key"),
    ],
)
def test_check_answers_yes_or_no_with_the_reason(arguments: tuple[str, ...], code: int, said: str) -> None:
    """As text and as exit code, so that a script can ask."""
    result = run("acl", "check", *arguments)
    assert (result.exit_code, result.stdout.strip()) == (code, said)
    found = json.loads(run("acl", "check", *arguments, "-o", "json").stdout)
    assert found["is_allowed"] is (code == 0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nobody", "PUB", "topic:orders"), 3, "no access key nobody"),
        (("shop", "PUB", "orders"), 2, "topic:NAME or group:NAME"),
        (("shop", "PUB", "group:billing"), 2, "with a group, one of ADMIN, SUB is expected"),
        (("shop", "READ", "topic:orders"), 2, "with a topic, one of ADMIN, PUB, SUB is expected"),
        (("shop", "PUB", "topic:orders", "--file", "gone.toml"), 1, "gone.toml cannot be read"),
    ],
)
def test_an_uncheckable_row_is_an_error(arguments: tuple[str, ...], code: int, said: str) -> None:
    """Not a no."""
    result = run("acl", "check", *arguments)
    assert result.exit_code == code
    assert said in result.stderr


def test_a_file_must_be_named_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option, or by the configuration of the daemon."""
    monkeypatch.delenv("DMQ_ACL")
    assert (run("acl", "ls").exit_code, run("acl", "ls", "--file", "acl.toml").exit_code) == (2, 0)


@pytest.mark.parametrize("name", [None, "shop-2", "shop@example.com"])
def test_new_prints_a_line_for_the_file(name: str | None) -> None:
    """Another secret each time, long enough that nobody guesses it."""
    arguments = ("acl", "new") if name is None else ("acl", "new", name)
    texts = [run(*arguments).stdout for _ in range(2)]
    (key,) = parse(texts[0]).by_name.values()
    assert name in {None, key.name}
    assert len(key.secret) == 40
    assert texts[0] != texts[1]
    assert tomllib.loads(texts[0])["keys"][key.name]["topics"] == {}
    found = json.loads(run(*arguments, "-o", "json").stdout)
    assert re.fullmatch(r"[\w-]{40}", found["secret_key"])


def test_new_refuses_invalid_access_keys() -> None:
    """A slash would end it in the signature."""
    assert run("acl", "new", "a/b").exit_code == 2


def test_commands_sign_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The secret comes from a variable or a file, and the option is the access key alone."""
    daemon = install(monkeypatch)
    secret_file = tmp_path / "secret"
    secret_file.write_text(f"{OPERATOR.secret_key}\n", encoding="utf-8")
    run("topic", "ls")
    run("topic", "ls", env={"DMQ_ACCESS_KEY": OPERATOR.access_key, "DMQ_SECRET_KEY": OPERATOR.secret_key})
    run("--access-key", OPERATOR.access_key, "--secret-file", str(secret_file), "topic", "ls", "-o", "json")
    first, *others = daemon.signers
    assert first is None
    assert len(others) == 2
    for signer in others:
        assert signer is not None
        claim = claim_of(dict(signer.metadata()).get)
        signature = signature_of(OPERATOR.secret_key.encode(), claim.date_time)
        assert (claim.access_key, claim.signature) == (OPERATOR.access_key, signature)


def test_a_key_without_a_secret_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where the secret is looked for."""
    install(monkeypatch)
    result = run("--access-key", "shop", "topic", "ls")
    assert result.exit_code == 2
    assert "DMQ_SECRET_KEY" in result.stderr
