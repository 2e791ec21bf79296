"""Rules of the setting ``redact``."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmq.config.redaction import RedactionRule, parse_redaction_rule
from dmq.config.settings import ConfigError, load

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("customers*", RedactionRule("customers*")),
        ("*", RedactionRule("*")),
        (" orders-* : Card.Number ", RedactionRule("orders-*", ("card", "number"))),
        ("shop%orders:e-mail address", RedactionRule("shop%orders", ("e-mail address",))),
    ],
)
def test_a_rule_is_a_pattern_and_a_path(text: str, rule: RedactionRule) -> None:
    """A pattern alone hides bodies; names of fields follow a colon."""
    assert parse_redaction_rule(text) == rule
    assert parse_redaction_rule(str(rule)) == rule


@pytest.mark.parametrize("text", ["", ":email", "orders:", "orders:card.", "orders:.number", "or ders", "orders,bills"])
def test_other_texts_are_refused(text: str) -> None:
    """An invalid rule is an error, never a rule that masks less."""
    with pytest.raises(ValueError, match="is not a rule; expected TOPIC"):
        parse_redaction_rule(text)


def test_the_setting_is_a_list_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has an array; a variable separates rules by semicolons; both are shown the same way."""
    (tmp_path / "dmq.toml").write_text('redact = ["customers*", "orders:card.number"]')
    monkeypatch.chdir(tmp_path)
    of_file = load()
    (tmp_path / "dmq.toml").unlink()
    monkeypatch.setenv("DMQ_REDACT", "customers*;orders:card.number")
    assert load().redact == of_file.redact == (RedactionRule("customers*"), RedactionRule("orders", ("card", "number")))
    assert load().shown()["redact"] == "customers*;orders:card.number"
    monkeypatch.setenv("DMQ_REDACT", "none")
    assert load().redact == ()
    assert load().shown()["redact"] == "none"


def test_an_invalid_setting_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and the expected form."""
    monkeypatch.setenv("DMQ_REDACT", "customers;:email")
    with pytest.raises(ConfigError, match=r"DMQ_REDACT: redact = .*':email' is not a rule"):
        load()
