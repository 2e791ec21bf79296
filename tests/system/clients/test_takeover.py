"""Official clients with the addresses of both hosts, across takeovers by a standby."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.clients.official.client import NEWEST, NODE, RUST, ClientError, Language, OfficialClient, require
from support.effort import drawn
from support.rigs.replica.pair import Pair

pytestmark = pytest.mark.integration
_WITHIN_S_MAX = 90.0
_ONE_ADDRESS = {NODE.name, RUST.name}  # they connect to no list of addresses: they get a name that leads to the primary


def _send(process: OfficialClient, topic: str, body: str) -> str:
    """Send until the client has an OK, as an application does; return the id of the message."""
    until_s = time.monotonic() + _WITHIN_S_MAX
    while True:
        try:
            return process.send("producer", topic, body=body)
        except ClientError:
            assert time.monotonic() < until_s
            threading.Event().wait(0.2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", drawn(NEWEST, 2), ids=lambda language: language.name)
def test_clients_continue_after_a_takeover(tmp_path: Path, language: Language) -> None:
    """A producer and a consumer continue at the other address, and after another takeover at the first one again."""
    require(language)
    topic = "orders"
    with closing(Pair(tmp_path)) as pair:
        pair.standby.wait_for("standby_listening", timeout_s=60)
        is_one = language.name in _ONE_ADDRESS
        addresses = pair.front.address if is_one else f"{pair.standby.address};{pair.primary.address}"
        with OfficialClient(language, tmp_path, addresses) as process:
            process.start("producer", "producer", topic)
            process.start("consumer", language.listener, topic, group="g")
            ids = {_send(process, topic, "before")}
            process.wait_for_messages("consumer", ids, within_s=_WITHIN_S_MAX)
            for body in ("after the first", "after the second"):
                pair.primary.kill()
                killed_s = time.monotonic()
                pair.take_over()
                served_s = time.monotonic()
                ids.add(_send(process, topic, body))
                found = process.wait_for_messages("consumer", ids, within_s=_WITHIN_S_MAX)
                done_s = time.monotonic()
                assert ids <= {each["message_id"] for each in found}
                print(f"{language.name}: served {served_s - killed_s:.1f} s, delivered {done_s - killed_s:.1f} s")
                pair.wait_for_standby(pair.standby)
                pair.standby.wait_for("standby_listening", timeout_s=60)
