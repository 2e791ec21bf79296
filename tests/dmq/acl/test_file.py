"""The file of access keys: what it may hold, who may read it, and when it is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.rigs.daemon.acl import ACL, KEYS, write_acl

from broker_adapter.runtime.clock import ManualClock
from dmq.acl.file import WINDOW_MS_DEFAULT, AclError, KeyFile, parse, read

SECRET = "hush-hush-hush"
ONE = f'[keys.one]\nsecret = "{SECRET}"\n'


def test_a_file_holds_keys_and_rules(tmp_path: Path) -> None:
    """Each with its secret and its rules; the operator's needs none."""
    keys = read(write_acl(tmp_path))
    assert set(keys.by_name) == {key.access_key for key in KEYS}
    assert [str(rule) for rule in keys.by_name["shop"].rules] == ["topic orders* = PUB|SUB", "group billing* = SUB"]
    assert keys.by_name["operator"].is_admin
    assert keys.window_ms == WINDOW_MS_DEFAULT


@pytest.mark.parametrize(("text", "window_ms"), [("none", None), ("5m", 300_000), ("0s", 0)])
def test_the_window_can_be_set(text: str, window_ms: int | None) -> None:
    """A duration, or none."""
    assert parse(f'signature_window = "{text}"\n{ONE}').window_ms == window_ms


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no access key"),
        ("[keys]\n", "no access key"),
        ("keys = 1\n", "no access key"),
        ("[keys.one]\n", "keys.one: secret: expected a string"),
        ("[keys.one]\nsecret = 17\n", "keys.one: secret: expected a string"),
        ('[keys.one]\nsecret = ""\n', "keys.one: secret: expected a string"),
        ("keys.one = 1\n", "keys.one: expected a table"),
        (f'[keys."a/b"]\nsecret = "{SECRET}"\n', "visible ASCII"),
        (f'[keys."a,b"]\nsecret = "{SECRET}"\n', "visible ASCII"),
        (f'[keys."a b"]\nsecret = "{SECRET}"\n', "visible ASCII"),
        (f'[keys.""]\nsecret = "{SECRET}"\n', "visible ASCII"),
        (f"{ONE}admin = 1\n", "keys.one: admin: expected true or false"),
        (f"{ONE}topic = {{ }}\n", "keys.one: unknown key 'topic'"),
        (f"{ONE}topics = 'orders'\n", "keys.one: topics: expected a table"),
        (f"{ONE}topics = {{ 'a b' = 'SUB' }}\n", "topics: 'a b': invalid pattern"),
        (f"{ONE}topics = {{ orders = 'READ' }}\n", "topics: 'orders': expected ADMIN, PUB, SUB, or several"),
        (f"{ONE}topics = {{ orders = '' }}\n", "topics: 'orders': expected ADMIN, PUB, SUB, or several"),
        (f"{ONE}topics = {{ orders = ['SUB'] }}\n", "topics: 'orders': expected ADMIN, PUB, SUB, or several"),
        (f"{ONE}topics = {{ orders = 'ADMIN' }}\n", "topics: 'orders': ADMIN on a topic requires"),
        (f"{ONE}groups = {{ billing = 'PUB' }}\n", "groups: 'billing': expected ADMIN, SUB, or several"),
        (f"{ONE}{ONE}", "line 3"),
        (f"x = 1\n{ONE}", "unknown key 'x'"),
        (f"signature_window = 15\n{ONE}", "signature_window: a duration needs a unit: 15ms, 15s or 15m, or none"),
        (f'signature_window = "15"\n{ONE}', "signature_window: a duration needs a unit: 15ms, 15s or 15m, or none"),
        (f"signature_window = true\n{ONE}", "signature_window: a duration is expected"),
        (f"signature_window = 1.5\n{ONE}", "signature_window: a duration is expected"),
        (f'secret = "{SECRET}\n', "line 1"),
        (f'[keys.one]\nsecret = "\\q{SECRET}"\n', "line 2"),
    ],
)
def test_a_wrong_file_is_refused_without_its_values(text: str, why: str, tmp_path: Path) -> None:
    """The text names the file, the key and the rule; what may be a secret is not in it."""
    path = write_acl(tmp_path, text)
    with pytest.raises(AclError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("mode", "is_good"), [(0o600, True), (0o400, True), (0o640, True), (0o604, False)])
@pytest.mark.parametrize("more", [0o000, 0o020, 0o004, 0o001])
def test_a_file_that_is_open_to_others_is_refused(mode: int, is_good: bool, more: int, tmp_path: Path) -> None:
    """Its owner, and its group to read, are all that may have access."""
    path = write_acl(tmp_path)
    path.chmod(mode | more)
    if is_good and not more:
        assert read(path).by_name
    else:
        with pytest.raises(AclError, match="others can access it"):
            read(path)


@pytest.mark.parametrize("kind", ["absent", "folder", "pipe", "binary", "large"])
def test_an_invalid_file_is_refused(kind: str, tmp_path: Path) -> None:
    """In one clear line."""
    path = tmp_path / "acl.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    elif kind == "large":
        path.write_text(ACL + "#" * 2**20, encoding="utf-8")
    if kind in {"binary", "large"}:
        path.chmod(0o600)
    with pytest.raises(AclError, match=str(path)):
        read(path)


def test_a_changed_file_is_read_within_a_second_and_a_wrong_one_reported_once(tmp_path: Path) -> None:
    """While it is wrong, or gone, the keys of before count."""
    clock = ManualClock()
    path = write_acl(tmp_path)
    file = KeyFile(path, clock)
    first = file.keys()
    write_acl(tmp_path, ONE)
    assert file.keys() is first, "it was looked at just now"
    clock.advance(1000)
    second = file.keys()
    assert set(second.by_name) == {"one"}
    for spoil in (lambda: write_acl(tmp_path, "[keys"), path.unlink):
        spoil()
        with capture_logs() as said:
            for _ in range(3):
                clock.advance(1000)
                assert file.keys() is second
        assert [each["event"] for each in said] == ["access_keys_load_failed"]
        assert str(path) in file.problem
    write_acl(tmp_path)
    clock.advance(1000)
    assert set(file.keys().by_name) == set(first.by_name)
    assert not file.problem


def test_a_change_of_mode_is_a_change(tmp_path: Path) -> None:
    """A file that is opened to others is told of, and closing it again mends that."""
    clock = ManualClock()
    path = write_acl(tmp_path)
    file = KeyFile(path, clock)
    file.keys()
    os.chmod(path, 0o644)  # noqa: PTH101 - as an operator does
    clock.advance(1000)
    with capture_logs() as said:
        file.keys()
    assert [each["event"] for each in said] == ["access_keys_load_failed"]
    assert all(key.secret_key not in str(said) for key in KEYS)


def test_roles_are_read() -> None:
    """A role, its bodies, and ADMIN on topics in the hand of an operator; a key of an older file has none."""
    keys = parse(
        """
        [keys.old]
        secret = "s"
        admin = true
        [keys.looks]
        secret = "s"
        role = "viewer"
        bodies = true
        [keys.works]
        secret = "s"
        role = "operator"
        topics = { "orders*" = "ADMIN" }
        """
    ).by_name
    assert [(key.role, key.is_admin, key.with_bodies) for key in keys.values()] == [
        ("admin", True, False),
        ("viewer", False, True),
        ("operator", False, False),
    ]
    assert str(keys["works"].rules[0]) == "topic orders* = ADMIN"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('role = "root"', "unknown role 'root'; expected viewer, operator, admin"),
        ('role = "viewer"\nadmin = true', "contradict"),
        ('role = "operator"', "requires ADMIN on at least one"),
        ("bodies = true", "role = viewer or operator"),
        ('role = "viewer"\nbodies = "yes"', "true or false"),
        ('topics = { "orders" = "ADMIN" }', 'requires role = "operator"'),
    ],
)
def test_roles_that_make_no_sense_are_refused(text: str, said: str) -> None:
    """Each says what is wrong, and nothing is guessed."""
    with pytest.raises(ValueError, match=said):
        parse(f'[keys.k]\nsecret = "s"\n{text}\n')
