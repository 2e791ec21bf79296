"""A message that its consumer cannot handle comes again, ends as a dead letter, and is sent again once that is mended.

    python retries.py [127.0.0.1:8081]

The group's policy, two attempts a second apart, and the redrive are an operator's work, so the `dmq` command does them.
"""

from __future__ import annotations

import subprocess
import sys
import threading

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"
DAEMON = ClientConfiguration(ADDRESS, Credentials())
TOPIC, GROUP = "invoices", "printer"


class Printer(MessageListener):
    """Fails while it has no paper."""

    def __init__(self) -> None:
        self.has_paper = False
        self.has_printed = threading.Event()

    def consume(self, message):
        """Return FAILURE to get the message again, by the group's policy."""
        text = f"{message.body.decode()}, attempt {message.delivery_attempt}"
        if not self.has_paper:
            print("no paper for", text)
            return ConsumeResult.FAILURE
        print("printed", text)
        self.has_printed.set()
        return ConsumeResult.SUCCESS


def dmq(*command: str) -> str:
    """Run the command, and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "dmq", *command], check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout


def main() -> None:
    """Let it fail, wait for the dead letter, mend it, redrive."""
    dmq("group", "set-policy", GROUP, "--fixed", "1s", "--max-attempts", "2", "--address", ADDRESS)
    printer = Printer()
    consumer = PushConsumer(DAEMON, GROUP, printer, {TOPIC: FilterExpression()})
    consumer.startup()
    producer = Producer(DAEMON, [TOPIC])
    producer.startup()
    message = Message()
    message.topic = TOPIC
    message.body = b"invoice 17"
    message_id = producer.send(message).message_id

    while message_id not in dmq("dead", "ls", GROUP, "--address", ADDRESS):
        threading.Event().wait(0.2)
    print("dead letter", message_id)

    printer.has_paper = True
    dmq("dead", "redrive", GROUP, "--id", message_id, "--yes", "--address", ADDRESS)
    printer.has_printed.wait(30)
    producer.shutdown()
    consumer.shutdown()


if __name__ == "__main__":
    main()
