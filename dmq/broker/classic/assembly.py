"""Parts of the broker for clients that divide queues among themselves: group members and sent-back messages."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.runtime.clock import Clock
from dmq.broker.classic.clients import ClassicClients
from dmq.broker.classic.send_back import SentBackMessages
from dmq.broker.failures import Failures, Outcomes
from dmq.broker.handles import ReceiptHandles
from dmq.broker.io import Commits, Reader
from dmq.broker.sending import Sends
from dmq.broker.topics import Catalog
from dmq.broker.transactions import Transactions


class Divided:
    """The two parts used by ``dmq.broker.in_process_client``."""

    def __init__(
        self,
        catalog: Catalog,
        commits: Commits,
        reader: Reader,
        *,
        clock: Clock,
        transactions: Transactions,
        sends: Sends,
        failures: Failures,
        receipts: ReceiptHandles,
        outcomes: Outcomes,
        levels_ms: Sequence[int],
    ) -> None:
        self.clients = ClassicClients(clock)
        transactions.attach(self.clients)
        self.sent_back = SentBackMessages(
            catalog,
            commits,
            reader,
            sends=sends,
            failures=failures,
            receipts=receipts,
            outcomes=outcomes,
            levels_ms=levels_ms,
        )
