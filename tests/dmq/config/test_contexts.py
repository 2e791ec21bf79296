"""Contexts: what counts of several sources, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmq.admin.client import AdminClient, DaemonUnavailable
from dmq.client import SidecarClient
from dmq.config.contexts import (
    Context,
    ContextError,
    ContextUnknown,
    Said,
    Target,
    changing,
    choose,
    load,
    path_of_file,
    target_of,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration folder of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DMQ_CONTEXT", raising=False)


def keep(name: str, context: Context) -> None:
    with changing() as held:
        held[0] = held[0].holding(name, context)


def test_each_setting_comes_from_the_first_source_that_has_it() -> None:
    """An address from an option, TLS from the environment, the rest from the context; what nobody says is left out."""
    chosen = choose(
        Said("option", Context(address="a:1")),
        Said("environment", Context(address="b:1", tls_ca=Path("/e.pem"))),
        Said("context", Context(address="c:1", tls=False, tls_server_name="dmq", access_key="k", secret="s")),
    )
    assert chosen.what == Context(
        address="a:1", tls_ca=Path("/e.pem"), tls_server_name="dmq", access_key="k", secret="s"
    )
    assert chosen.sources["address"] == "option"
    assert chosen.sources["secret"] == "context"


def test_a_secret_stays_with_its_key(tmp_path: Path) -> None:
    """The secret of another source's key is never used; one without a key is."""
    prod = Said("context", Context(access_key="prod", secret="of-prod"))
    other = Said("environment", Context(access_key="other", secret="of-other"))
    assert choose(other, prod).target() == Target(access_key="other", secret="of-other")
    keyless = Said("environment", Context(secret="loose"))
    assert choose(keyless, prod).target().secret == "of-prod"
    assert choose(Said("option", Context(access_key="prod")), other, prod).target().secret == "of-prod"
    with pytest.raises(ContextError, match="no secret for access key mine"):
        choose(Said("option", Context(access_key="mine")), other, prod).target()
    (tmp_path / "secret").write_text("from-file\n")
    filed = Said("option", Context(access_key="mine", secret_file=tmp_path / "secret"))
    assert choose(filed).target().secret == "from-file"


def test_any_setting_of_tls_selects_tls() -> None:
    """An authority is enough; ``tls = false`` of a nearer source turns it off; half a certificate is refused."""
    context = Said("context", Context(tls_ca=Path("/ca.pem")))
    assert choose(context).target().tls is not None
    assert choose(Said("option", Context(tls=False)), context).target().tls is None
    with pytest.raises(ContextError, match="--tls-cert and --tls-key"):
        choose(Said("option", Context(tls_cert=Path("/c.pem")))).target()


def test_a_kept_file_is_read_again_and_private() -> None:
    """Every field survives, the mode is 600, a file that is open to others is refused, secrets are in no ``repr``."""
    context = Context(
        address="dmq.example:8081",
        tls=True,
        tls_ca=Path("/ca.pem"),
        tls_cert=Path("/c.pem"),
        tls_key=Path("/k.pem"),
        tls_server_name="dmq",
        access_key="ops",
        secret="s3cret",
        secret_file=Path("/s"),
    )
    keep("prod", context)
    keep("test", Context(address="test:1"))
    assert load().get("prod") == context
    assert (load().current, sorted(load().by_name)) == ("prod", ["prod", "test"])
    assert path_of_file().stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in repr(load())
    assert "s3cret" not in str(context.shown())
    path_of_file().chmod(0o640)
    with pytest.raises(ContextError, match="chmod 600"):
        load()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1, "contexts": {"p": {"adress": "a:1"}}}',
        '{"version": 1, "contexts": {"p": {"address": "nowhere"}}}',
        '{"version": 1, "contexts": {"p": {"tls": "yes"}}}',
        '{"version": 1, "contexts": {"a b": {}}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error_and_stays(content: str) -> None:
    """It names the file; nobody writes over it."""
    keep("prod", Context(secret="s3cret"))
    path_of_file().write_text(content)
    with pytest.raises(ContextError, match=r"contexts\.json cannot be used") as told:
        keep("other", Context())
    assert "\n" not in str(told.value)
    assert path_of_file().read_text() == content


def test_a_change_that_fails_leaves_the_file_as_it_was() -> None:
    """What is raised inside, or a kill before the rename, costs nothing."""
    keep("prod", Context(address="a:1"))
    before = path_of_file().read_bytes()
    with pytest.raises(ContextUnknown, match="known: prod"), changing() as held:
        held[0] = held[0].without("nope")
    path_of_file().with_name(".contexts.json.tmp").write_text("torn")
    assert path_of_file().read_bytes() == before
    keep("more", Context())
    assert sorted(json.loads(path_of_file().read_text())["contexts"]) == ["more", "prod"]


def test_the_hooks_client_comes_from_a_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name, by the variable, or the current one; without any it says what to do."""
    with pytest.raises(ContextError, match="no context is selected"):
        target_of()
    keep("one", Context(address="one:1"))
    keep("two", Context(address="two:1"))
    with SidecarClient.from_context("two") as two, SidecarClient.from_context() as one:
        assert (two.address, one.address) == ("two:1", "one:1")
    with AdminClient.from_context("two") as admin, pytest.raises(DaemonUnavailable, match="two:1"):
        admin.status()
    monkeypatch.setenv("DMQ_CONTEXT", "two")
    assert target_of().address == "two:1"
    keep("bad", Context(tls_ca=tmp_path / "missing.pem"))
    with pytest.raises(ContextError, match=r"missing\.pem cannot be read"):
        SidecarClient.from_context("bad")
