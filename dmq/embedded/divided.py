"""What the broker has for clients that divide queues among themselves: who is there, and what groups sent back."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.clock import Clock
from dmq.embedded.catalog import Catalog
from dmq.embedded.clients import Clients
from dmq.embedded.commits import Commits
from dmq.embedded.failures import Failures
from dmq.embedded.reader import Reader
from dmq.embedded.receipt import ReceiptHandles
from dmq.embedded.sends import Sends
from dmq.embedded.sent_back import SentBack
from dmq.embedded.settled import Settled
from dmq.embedded.transactions import Transactions


class Divided:
    """The two parts behind ``dmq.embedded.classic``."""

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
        settled: Settled,
        levels_ms: Sequence[int],
    ) -> None:
        self.clients = Clients(clock)
        transactions.attach(self.clients)
        self.sent_back = SentBack(
            catalog,
            commits,
            reader,
            sends=sends,
            failures=failures,
            receipts=receipts,
            settled=settled,
            levels_ms=levels_ms,
        )
