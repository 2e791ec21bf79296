"""Messages of one message group keep their order; other groups do not wait for them.

python fifo.py [127.0.0.1:8081]
"""

from __future__ import annotations

import sys

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

DAEMON = ClientConfiguration(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081", Credentials())
TOPIC, GROUP = "account-events", "ledger"
STEPS = ("opened", "paid in", "closed")
ACCOUNTS = ("alice", "bob")


def main() -> None:
    """Send the steps of two accounts, each account a message group, and receive them."""
    producer = Producer(DAEMON, [TOPIC])
    producer.startup()
    for step in STEPS:
        for account in ACCOUNTS:
            message = Message()
            message.topic = TOPIC
            message.message_group = account
            message.body = f"{account} {step}".encode()
            producer.send(message)

    consumer = SimpleConsumer(DAEMON, GROUP, {TOPIC: FilterExpression()}, await_duration=10)
    consumer.startup()
    left = len(STEPS) * len(ACCOUNTS)
    while left:
        # The next message of an account comes once the one before it is acknowledged.
        for each in consumer.receive(16, 30):
            print(each.body.decode())
            consumer.ack(each)
            left -= 1
    producer.shutdown()
    consumer.shutdown()


if __name__ == "__main__":
    main()
