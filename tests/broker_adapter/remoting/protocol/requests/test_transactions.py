"""How a transaction ends, and the question of a broker about one."""

from __future__ import annotations

import pytest
from support.forges.messages.stored import a_stored

from broker_adapter.contracts.classic import Decision, QueueReceipt, SendStatus
from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame
from broker_adapter.remoting.protocol.requests.transactions import check_of, end_fields

RECEIPT = QueueReceipt(
    SendStatus.STORED, "M1", MessageQueue("orders", "a", 3), 5, "7F00000100002A9F0000000000000007", "T1"
)
QUESTION = RemotingFrame(code=39, fields={"transactionId": "T1"}, body=a_stored(properties={"PGROUP": "g"}))


@pytest.mark.parametrize(
    ("decision", "bits"), [(Decision.COMMIT, "8"), (Decision.ROLLBACK, "12"), (Decision.UNKNOWN, "0")]
)
def test_an_end_names_the_place_of_the_half_message(decision: Decision, bits: str) -> None:
    """As its receipt said it."""
    fields = end_fields("g", RECEIPT, decision, None)
    place = fields["tranStateTableOffset"], fields["commitLogOffset"], fields["commitOrRollback"]
    assert place == ("5", "7", bits)
    assert (fields["msgId"], fields["transactionId"], fields["fromTransactionCheck"]) == ("M1", "T1", "false")


def test_an_answer_repeats_the_place_of_the_question() -> None:
    """A broker stores a half message anew before it asks again."""
    check = check_of(QUESTION, "a")
    assert (check.group, check.message.message.body, check.transaction_id, check.broker) == ("g", b"hello", "T1", "a")
    fields = end_fields("g", RECEIPT, Decision.COMMIT, check)
    assert (fields["tranStateTableOffset"], fields["commitLogOffset"]) == ("41", "9000")
    assert fields["fromTransactionCheck"] == "true"


@pytest.mark.parametrize("body", [b"", a_stored() * 2, a_stored(), a_stored(crc=1), b"xx"])
def test_a_question_that_is_none_is_broken(body: bytes) -> None:
    """No message, several, one of nobody's, one that is damaged."""
    with pytest.raises(FrameBroken):
        check_of(RemotingFrame(code=39, body=body), "a")


def test_a_receipt_of_a_one_way_send_ends_nothing() -> None:
    """Nobody knows where its message lies."""
    with pytest.raises(Refused, match="not of a half message"):
        end_fields("g", RECEIPT._replace(offset_id=""), Decision.COMMIT, None)
