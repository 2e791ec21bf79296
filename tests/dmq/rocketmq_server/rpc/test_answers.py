"""Whether there is room for an answer before it is made: what its client does not take at once counts for it."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.adapter import PulledMessage
from broker_adapter.contracts.errors import Overloaded
from dmq.http2.admission.bounds import Accounts
from dmq.rocketmq_server.rpc.answers import PIECE_BYTES, check_room

MIB = 1024 * 1024


def a_message(size: int) -> PulledMessage:
    """Return one of so many bytes."""
    return PulledMessage("m-1", bytes(size), 0, 0, 0, 0)


def test_an_answer_for_which_there_is_no_room_is_refused() -> None:
    """With the pool and its bound; nothing stays counted, and a small one is always given."""
    accounts = Accounts(8 * MIB, MIB)
    account = accounts.open("192.0.2.7", "", lambda _: None)
    check_room([a_message(MIB)], account)
    account.hold(MIB + MIB // 2)  # of two, a quarter of all
    with pytest.raises(Overloaded, match=r"answers that wait \(address 192\.0\.2\.7\) \(limit 2097152\)"):
        check_room([a_message(MIB // 2), a_message(MIB // 2)], account)
    check_room([a_message(PIECE_BYTES)], account)
    check_room([a_message(MIB)], None)
    assert account.bytes_held == MIB + MIB // 2


def test_the_client_with_most_waiting_bytes_makes_room_for_an_answer() -> None:
    """Another connection's, which does not read: who reads is served."""
    accounts = Accounts(8 * MIB, MIB)
    lazy = accounts.open("192.0.2.7", "", lambda account: account.hold(-account.bytes_held))
    lazy.hold(2 * MIB)
    account = accounts.open("192.0.2.7", "", lambda _: None)
    check_room([a_message(MIB)], account)
    assert not lazy.bytes_held
