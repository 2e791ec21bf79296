"""Send a message now that is delivered in two seconds, and receive it.

python delayed.py [127.0.0.1:8081]
"""

from __future__ import annotations

import sys
import time

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

DAEMON = ClientConfiguration(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081", Credentials())
TOPIC, GROUP = "reminders", "mailer"


def main() -> None:
    """Send, and receive until it is there."""
    producer = Producer(DAEMON, [TOPIC])
    producer.startup()
    message = Message()
    message.topic = TOPIC
    message.body = b"two seconds later"
    # A delay that the daemon counts by its own clock. `message.delivery_timestamp` would be an instant of this host's.
    message.add_property("TIMER_DELAY_MS", "2000")
    sent_s = time.monotonic()
    print("sent    ", producer.send(message).message_id)

    consumer = SimpleConsumer(DAEMON, GROUP, {TOPIC: FilterExpression()}, await_duration=10)
    consumer.startup()
    received = []
    while not received:  # each call waits up to 10 s
        received = consumer.receive(16, 30)  # at most 16 messages; 30 s to acknowledge them
    for each in received:
        print("received", each.message_id, each.body.decode(), f"after {time.monotonic() - sent_s:.1f} s")
        consumer.ack(each)
    producer.shutdown()
    consumer.shutdown()


if __name__ == "__main__":
    main()
