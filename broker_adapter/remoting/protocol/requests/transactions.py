"""Transaction decisions and transaction checks, as fields of the protocol. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from broker_adapter.contracts.classic import Decision, QueueReceipt, TransactionCheck
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame
from broker_adapter.remoting.protocol.ids import decode_offset_id
from broker_adapter.remoting.protocol.properties import PRODUCER_GROUP
from broker_adapter.remoting.protocol.requests.pulling import received
from broker_adapter.remoting.protocol.stored import StoredMessage, decode_messages

_DECISIONS: Mapping[Decision, int] = {Decision.COMMIT: 8, Decision.ROLLBACK: 12, Decision.UNKNOWN: 0}  # bits of sysFlag


def end_fields(
    group: str, receipt: QueueReceipt, decision: Decision, check: TransactionCheck | None
) -> Mapping[str, str]:
    """Return the fields that end a transaction.

    A broker may store a half message again after its send. An answer to a check therefore uses the position in the
    check.
    """
    offset_id, queue_offset = receipt.offset_id, receipt.queue_offset
    message_id, transaction_id = receipt.message_id, receipt.transaction_id
    if check is not None:
        offset_id, queue_offset = check.message.offset_id, check.message.queue_offset
        message_id, transaction_id = check.message.message.message_id, check.transaction_id
    if not offset_id:
        raise Refused(
            Rule.TRANSACTION_ID, "the receipt is not of a half message: it has no offset id", value=message_id
        )
    return {
        "topic": receipt.queue.topic,
        "bname": receipt.queue.broker if check is None else check.broker,
        "producerGroup": group,
        "tranStateTableOffset": str(queue_offset),
        "commitLogOffset": str(decode_offset_id(offset_id).log_offset),
        "commitOrRollback": str(_DECISIONS[decision]),
        "fromTransactionCheck": "false" if check is None else "true",
        "msgId": message_id,
        "transactionId": transaction_id,
    }


def check_of(request: RemotingFrame, broker: str) -> TransactionCheck:
    """Decode a broker's transaction check; ``FrameBroken`` for an invalid one."""
    try:
        (stored,) = decode_messages(request.body)
    except ValueError:
        raise FrameBroken("transaction check without exactly one message") from None
    group = stored.properties.get(PRODUCER_GROUP, "") if isinstance(stored, StoredMessage) else ""
    if not isinstance(stored, StoredMessage) or not group:
        raise FrameBroken(f"transaction check of an unreadable message: {stored}")
    queue = MessageQueue(stored.topic, broker, stored.queue_id)
    transaction_id = request.fields.get("transactionId") or stored.message_id
    return TransactionCheck(group, received(stored, queue), transaction_id, broker)
