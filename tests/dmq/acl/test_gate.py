"""Admission of calls by their headers: guesses of an address are bounded, and stop no other client."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rigs.daemon.acl import READER, SHOP, Key, write_acl

from broker_adapter.runtime.clock import ManualClock
from dmq.acl.file import KeyFile
from dmq.acl.gate import Entrance, RpcPolicy
from dmq.acl.guard import Authenticator
from dmq.acl.quotas import Quotas
from dmq.http2 import LOOPBACK
from dmq.runtime.guess_limit import CALLS

pytestmark = pytest.mark.unit
ENTRANCE = Entrance(rpc="SendMessage", lacks=lambda _: None)
ATTACKER, CLIENT = "203.0.113.7", "198.51.100.9"
GUESS = Key(SHOP.access_key, "guess")


class Calls:
    """Calls to a daemon with access keys."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        guard = Authenticator(KeyFile(write_acl(folder), self.clock), self.clock)
        self._policy = RpcPolicy({}, guard, Quotas(self.clock))

    def refusal(self, key: Key | None, address: str) -> str:
        """Call from an address; return why the call is refused, or an empty text."""
        headers = dict(key.signer(self.clock).metadata()) if key is not None else {}
        return str(self._policy.judge(ENTRANCE, headers.get, address).refusal or "")


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    """Calls to a new daemon."""
    return Calls(tmp_path)


def test_guesses_of_an_address_are_bounded(calls: Calls) -> None:
    """Above the limit a signature is not checked, right or wrong; later there are some more."""
    found = [calls.refusal(GUESS, ATTACKER) for _ in range(3 * CALLS.per_address)]
    assert sum("not checked" not in each for each in found) == CALLS.per_address
    assert "not checked" in calls.refusal(SHOP, ATTACKER)
    calls.clock.advance(60_000)
    assert calls.refusal(SHOP, ATTACKER) == ""


def test_a_client_is_not_stopped_by_another_one(calls: Calls) -> None:
    """By one at another address, and, once its key was right, by one at its own address."""
    assert calls.refusal(SHOP, ATTACKER) == ""
    for _ in range(3 * CALLS.per_address):
        calls.refusal(GUESS, ATTACKER)
    assert [calls.refusal(*each) for each in ((SHOP, ATTACKER), (READER, CLIENT), (READER, LOOPBACK))] == ["", "", ""]


def test_unsigned_calls_and_those_of_this_host_are_no_guesses(calls: Calls) -> None:
    """A client without credentials uses up nothing; the web processes of this host count for their own callers."""
    for _ in range(3 * CALLS.per_address):
        assert "not signed" in calls.refusal(None, CLIENT)
        calls.refusal(GUESS, LOOPBACK)
    assert [calls.refusal(SHOP, each) for each in (CLIENT, LOOPBACK)] == ["", ""]
