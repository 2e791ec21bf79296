"""A message that is seen only if the database's transaction was committed; and what happens if its sender dies between.

python transaction.py [127.0.0.1:8081]
"""

from __future__ import annotations

import sqlite3
import sys

from rocketmq import (
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

DAEMON = ClientConfiguration(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081", Credentials())
TOPIC, GROUP = "orders-paid", "shipping"

database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")


class Orders(TransactionChecker):
    """Asked by the daemon what became of a message whose sender said nothing: the database knows."""

    def check(self, message):
        """Return whether the order was written."""
        known = database.execute("SELECT 1 FROM orders WHERE id = ?", (message.body.decode(),)).fetchone()
        print("asked about", message.body.decode())
        return TransactionResolution.COMMIT if known else TransactionResolution.ROLLBACK


def main() -> None:
    """Pay three orders: one as planned, one that fails, one whose sender forgets to commit the message."""
    producer = Producer(DAEMON, [TOPIC], checker=Orders())
    producer.startup()

    def begin(order: str):
        message = Message()
        message.topic = TOPIC
        message.body = order.encode()
        transaction = producer.begin_transaction()
        producer.send(message, transaction)  # on disk, and seen by nobody
        return transaction

    paid = begin("order 1")
    database.execute("INSERT INTO orders VALUES ('order 1')")
    paid.commit()
    begin("order 2").rollback()
    begin("order 3")
    database.execute("INSERT INTO orders VALUES ('order 3')")  # and the process dies here: see `Orders`

    consumer = SimpleConsumer(DAEMON, GROUP, {TOPIC: FilterExpression()}, await_duration=10)
    consumer.startup()
    shipped: set[str] = set()
    while shipped != {"order 1", "order 3"}:
        for each in consumer.receive(16, 30):
            shipped.add(each.body.decode())
            print("shipped", each.body.decode())
            consumer.ack(each)
    producer.shutdown()
    consumer.shutdown()


if __name__ == "__main__":
    main()
