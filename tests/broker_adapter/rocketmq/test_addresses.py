"""Addresses as users write them, and handles that say which proxy they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.endpoints import parse_endpoints
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.rocketmq.addresses import Name, address_of, endpoints_of
from broker_adapter.wire import rocketmq_v2 as wire


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:8081", ("127.0.0.1:8081",)),
        (" a.b:1 ; c:65535,", ("a.b:1", "c:65535")),
        ("[::1]:8081;a:1;a:1", ("[::1]:8081", "a:1")),
    ],
)
def test_addresses_are_read(text: str, addresses: tuple[str, ...]) -> None:
    """Several, each once, and back to what the protocol says."""
    assert parse_endpoints(text) == addresses
    assert tuple(address_of(endpoints_of(each)) for each in addresses) == addresses


@pytest.mark.parametrize(
    "text", ["", " ; ", "host", "host:", ":80", "host:0", "host:65536", "host:x", "::1:80", "http://a:1", "a:²"]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    """It says what is allowed."""
    with pytest.raises(ValueError, match=r"host:port|port from 1"):
        parse_endpoints(text)


def test_a_route_without_an_address_names_none() -> None:
    """Nor one whose port cannot be."""
    assert not address_of(wire.Endpoints())
    assert not address_of(wire.Endpoints(addresses=[wire.Address(host="a", port=0)]))


@given(client_id=st.text(max_size=40), message_id=st.text(max_size=40), given=st.text(min_size=1))
def test_a_handle_is_read_as_it_was_written(client_id: str, message_id: str, given: str) -> None:
    """Whatever the proxy gave, spaces too."""
    name = Name("host:1", client_id, message_id, given)
    assert Name.of(str(name), Rule.RECEIPT_HANDLE) == name


@given(st.text(max_size=60))
def test_an_invalid_handle_is_refused(text: str) -> None:
    """With the rule of whoever reads it, or it is read as something that an adapter could have given."""
    try:
        name = Name.of(text, Rule.TRANSACTION_ID)
    except Refused as refused:
        assert refused.rule is Rule.TRANSACTION_ID  # noqa: PT017 - one of two outcomes
    else:
        assert name.given


@pytest.mark.parametrize(
    "text", ["", "x", "host:1", "host:1 1 1 ab", "host:1 -1 1 abc", "host:1 1 1", "host 1 1 abc", "host:1 99999 1 abc"]
)
def test_handles_that_are_cut_or_made_up(text: str) -> None:
    """Each is refused."""
    with pytest.raises(Refused):
        Name.of(text, Rule.RECEIPT_HANDLE)
