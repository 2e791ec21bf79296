"""The guide of the hook does what it says: its blocks of code are run as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "HOOK.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def block(containing: str) -> str:
    """The one block with a text in it."""
    found: str
    (found,) = [each for each in BLOCKS if containing in each]
    return found


class Producer:
    """A producer that is up, or not."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_up = True

    def send(self, topic: str, payload: bytes) -> str:
        """Send, or fail."""
        if not self.is_up:
            raise ConnectionError(f"no route to {topic}")
        self.sent.append(payload)
        return "receipt"


def test_the_first_example(tmp_path: Path) -> None:
    """A send while the broker is up, and one while it is away."""
    from dmq import Delivered, Spooled

    producer = Producer()
    names: dict[str, Any] = {"producer": producer}
    exec(block("outcome = redelivery.send(").replace("/var/lib/shop", str(tmp_path)), names)
    redelivery = names["redelivery"]
    assert names["outcome"] == Delivered(uid=names["outcome"].uid)
    producer.is_up = False
    assert isinstance(redelivery.send("order-created", b"2"), Spooled)
    assert redelivery.close().still_waiting == 1


def test_one_line_around_a_producer(tmp_path: Path) -> None:
    """The producer's own receipt when it is up, ``Spooled`` when it is not."""
    from dmq import Spooled, durable

    assert 'durable(producer, "' in block("from dmq import durable")
    producer = Producer()
    with durable(producer, tmp_path / "spool") as sends:
        assert sends.send("orders", b"1") == "receipt"
        producer.is_up = False
        assert isinstance(sends.send("orders", b"2"), Spooled)


def test_the_test_of_the_guide_passes() -> None:
    """What readers copy into their own tests."""
    names: dict[str, Any] = {}
    exec(block("FakeProducer("), names)
    test: Callable[[], None] = names["test_an_outage_loses_no_order"]
    test()


@pytest.mark.parametrize("text", BLOCKS)
def test_every_block_is_python(text: str) -> None:
    """Also those that need a broker to run."""
    compile(text, "docs/HOOK.md", "exec")
