"""``dmq replica promote`` while a standby has batches that the log may lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.rigs.commands.fake_admin_client import run_dmq

from dmq.replication.directory_objects import DirectoryObjects
from dmq.replication.lease import LEASE, LeaseRecord
from dmq.replication.link import LINK, LinkRecord
from dmq.replication.segment import SegmentHead, encode_batch, encode_segment, segment_name
from dmq.store.engines.engine import Batch
from dmq.store.schema.cell.position import NO_CHECKSUM

pytestmark = pytest.mark.integration


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    """Return a log of epoch 1 with a lease, and with a member of the direct link."""
    found = DirectoryObjects(tmp_path.as_uri())
    data, _ = encode_segment(SegmentHead(7, 1, 1, 1, 0, bytes(16), NO_CHECKSUM), [encode_batch(Batch())])
    assert found.create(segment_name(1), data)
    assert found.replace(LEASE, LeaseRecord("holder", "a:8081", 1, 1_000, 1, is_bound=True).encode(), None)
    assert found.replace(LINK, LinkRecord(1, "member", "b:8085").encode(), None)
    return found


def test_a_promotion_names_the_standby_that_has_the_messages(objects: DirectoryObjects) -> None:
    """The register stays, so no other standby takes over."""
    done = run_dmq("replica", "promote", "--replica-url", objects.url)
    assert done.exit_code == 0, done.stderr
    assert "only the standby at b:8085; --accept-loss allows others" in done.stdout
    record = LinkRecord.decode(objects.read(LINK))
    assert record is not None
    assert record.member == "member"


def test_a_promotion_with_accepted_loss_removes_the_member(objects: DirectoryObjects) -> None:
    """Then every standby may take over, and the old primary names no member any more."""
    done = run_dmq("replica", "promote", "--replica-url", objects.url, "--accept-loss", "-o", "json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"released": "a:8081", "epoch": 1, "link": "b:8085", "loss_accepted": True}
    record = LinkRecord.decode(objects.read(LINK))
    assert record is not None
    assert (record.epoch, record.member, record.is_sealed) == (1, "", True)
