"""The table from errors to the protocol's codes is complete, and no internals leak."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.codec.codes import CODES, OK_STATUS, common_status, status_of


@pytest.mark.parametrize("rule", list(Rule))
def test_every_rule_has_a_code_of_the_protocol(rule: Rule) -> None:
    """A rule without one would be answered as an internal error."""
    code = CODES[rule]
    assert wire.Code.Name(code)
    assert 40000 <= code < 44000 or code == wire.NOT_IMPLEMENTED
    assert status_of(Refused(rule, "why")).code == code


def test_no_two_rules_share_a_code() -> None:
    """The code says which rule it was."""
    assert len(set(CODES.values())) == len(Rule)


def test_a_refusal_names_value_and_limit() -> None:
    """The text is the error's own."""
    status = status_of(Refused(Rule.BODY_SIZE, "the body is too large", value=5, limit="4 bytes"))
    assert status.code == wire.MESSAGE_BODY_TOO_LARGE
    assert status.message == "message body too large: the body is too large, got 5, limit 4 bytes"


def test_overload_and_outage_differ() -> None:
    """Nothing was done, or nobody knows: the second one says what to do about it."""
    overloaded = status_of(Overloaded("sends in flight", limit=4))
    assert (overloaded.code, "limit 4" in overloaded.message) == (wire.TOO_MANY_REQUESTS, True)
    down = status_of(BrokerUnavailable("the store is closed"))
    assert down.code == wire.INTERNAL_SERVER_ERROR
    assert down.message.startswith("the store is closed; ")
    assert "in doubt: repeat it with the same message id" in down.message


def test_an_unexpected_error_shows_no_internals() -> None:
    """Its text and type belong in the log."""
    status = status_of(KeyError("/secret/path"))
    assert status.code == wire.INTERNAL_SERVER_ERROR
    assert "secret" not in status.message
    assert "KeyError" not in status.message


def test_rust_clients_get_no_code_they_would_panic_on() -> None:
    """41302 is unknown to the Rust client 5.0.0; the text still tells."""
    error = Refused(Rule.BODY_EMPTY, "empty")
    assert status_of(error, "JAVA").code == wire.MESSAGE_BODY_EMPTY
    assert status_of(error, "RUST").code == wire.BAD_REQUEST
    assert status_of(error, "RUST").message == status_of(error).message
    assert status_of(Refused(Rule.TOPIC, "bad"), "RUST").code == wire.ILLEGAL_TOPIC


def test_entries_share_a_status_or_the_answer_is_mixed() -> None:
    """30000 only when they differ."""
    bad, worse = wire.Status(code=wire.INVALID_RECEIPT_HANDLE, message="x"), wire.Status(code=wire.BAD_REQUEST)
    assert common_status([OK_STATUS, OK_STATUS]).code == wire.OK
    assert common_status([bad, bad]) == bad
    assert common_status([OK_STATUS, bad]).code == wire.MULTIPLE_RESULTS
    assert common_status([worse, bad]).code == wire.MULTIPLE_RESULTS
