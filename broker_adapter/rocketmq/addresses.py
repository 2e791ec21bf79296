"""Addresses of proxies, and handles that include the proxy that issued them."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from broker_adapter.contracts.endpoints import PORT_MAX, parse_endpoints
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire

_LENGTH_DIGITS_MAX = 4


def address_of(endpoints: wire.Endpoints) -> str:
    """Return the address to connect to for an entry of a route; empty if the entry has no usable address."""
    for each in endpoints.addresses:
        if each.host and 0 < each.port <= PORT_MAX:
            return f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}"
    return ""


def endpoints_of(address: str) -> wire.Endpoints:
    """Return an address in the form of the protocol."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        scheme = wire.IPv6 if ipaddress.ip_address(host).version == 6 else wire.IPv4
    except ValueError:
        scheme = wire.DOMAIN_NAME
    return wire.Endpoints(scheme=scheme, addresses=[wire.Address(host=host, port=int(port))])


class Name(NamedTuple):
    """Handle of a proxy, with the proxy and client that it was issued to. Only that proxy is sure to accept it.

    Its text form is the handle given to our clients.
    """

    address: str  # of the proxy
    client_id: str
    message_id: str
    given: str  # receipt handle, recall handle or transaction id

    def __str__(self) -> str:
        return (
            f"{self.address} {len(self.client_id)} {len(self.message_id)} {self.client_id}{self.message_id}{self.given}"
        )

    @classmethod
    def of(cls, handle: str, rule: Rule) -> Name:
        """Parse the text form of a handle; ``Refused(rule)`` for a handle that this adapter did not issue."""
        try:
            address, client_chars, id_chars, rest = handle.split(" ", 3)
            (checked,) = parse_endpoints(address)
            ends = _length(client_chars), _length(client_chars) + _length(id_chars)
        except ValueError:
            raise Refused(rule, "not issued by this adapter", value=handle) from None
        if checked != address or ends[1] >= len(rest):
            raise Refused(rule, "not issued by this adapter", value=handle)
        return cls(address, rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :])


def _length(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX:
        raise ValueError(digits)
    return int(digits)
