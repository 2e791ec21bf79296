"""Several messages in one request. Of the official clients only Rust's can send them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.official_client import RUST, ClientError, OfficialClient, require


@pytest.fixture(params=[RUST], ids=lambda language: language.name)
def process(request: pytest.FixtureRequest, daemon: Daemon, tmp_path: Path) -> Iterator[OfficialClient]:
    """The process of the client, with a producer ``p`` and a consumer ``c`` of ``orders``."""
    require(request.param)
    home = tmp_path / "home"
    home.mkdir()
    with OfficialClient(request.param, home, daemon.address) as client:
        client.start("p", "producer", "orders")
        client.start("c", "simple", "orders", group="billing", wait_s=3)
        yield client
    daemon.stop()


def test_every_message_of_a_batch_is_one_of_its_own(process: OfficialClient) -> None:
    """Each has its own receipt, in the order of the request, and its own delivery; a batch is taken whole or not."""
    bodies = [f"body {number}" for number in range(10)]
    ids = process.do("batch", name="p", topic="orders", bodies=bodies, tag="red", properties={"x": "1"})
    assert len(set(ids)) == 10
    found = process.receive_until("c", 10)
    assert {each["message_id"]: each["body"] for each in found} == dict(zip(ids, bodies, strict=True))
    assert {(each["tag"], each["properties"]["x"], each["attempt"]) for each in found} == {("red", "1", 1)}
    with pytest.raises(ClientError) as refused:
        process.do("batch", name="p", topic="orders", bodies=["a", "b"], properties={"TIMER_DELAY_SEC": "soon"})
    assert refused.value.code == 40012
    assert process.do("receive", name="c") == []
