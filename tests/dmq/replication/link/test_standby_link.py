"""Direct link between a store and standbys: answers, takeovers, members, and tails that the log continues without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.rigs.replica.linked_pair import CLOCK, WAIT_S, LinkedStore, StandbyHost, keys_of
from support.rigs.replica.objects import MemoryObjects

from dmq.recovery.replica import diverged_tails
from dmq.replication.link import LINK, LinkRecord, LinkState
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.restore import check, restore
from dmq.replication.role import link_member, release_link
from dmq.replication.segment import PREFIX
from dmq.store.store import Store

pytestmark = pytest.mark.integration


class Rig:
    """One primary and two standbys."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.objects = MemoryObjects()
        self._stack = stack
        self.primary = LinkedStore(folder / "first", self.objects)
        stack.callback(self.primary.lose)
        self.member, self.other = self.standby("second"), self.standby("third")

    def standby(self, name: str) -> StandbyHost:
        """Return a standby."""
        host = StandbyHost(self.folder / name, self.objects)
        self._stack.callback(host.close)
        return host

    @property
    def segments(self) -> int:
        """Number of segments of the log."""
        return len(self.objects.list(PREFIX))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Return a primary with two standbys, without a link yet."""
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


def test_a_takeover_has_batches_that_only_the_standby_has(rig: Rig) -> None:
    """Batches are answered while no segment can be written, and the member of the link takes over with them."""
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    before = rig.segments
    for number in range(20):
        rig.primary.put(b"%d" % number)
    assert rig.segments == before
    assert rig.primary.log.status().lag_batches == 0
    rig.primary.lose()
    assert rig.segments == before
    assert rig.member.take_over(rig.objects) == {b"%d" % number for number in range(20)}
    assert check(rig.objects).faults == ()


def test_a_standby_that_is_not_the_member_does_not_take_over(rig: Rig) -> None:
    """It leaves the takeover to the member, until an operator accepts the loss of the batches that the member has."""
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    rig.primary.put(b"only at the member")
    rig.primary.lose()
    assert rig.other.link.begin_takeover() is None
    assert rig.other.link.reserved_for() == rig.member.link.address
    record = link_member(rig.objects)
    assert record is not None
    assert record.address == rig.member.link.address
    release_link(rig.objects)
    assert link_member(rig.objects) is None
    assert rig.other.take_over(rig.objects) == set()


def test_an_acknowledgement_counts_once_the_register_names_the_standby(rig: Rig) -> None:
    """While the register cannot be written, a batch is answered by its segment alone."""
    rig.primary.hold_segments(also=LINK)
    rig.primary.sender.offer([rig.member.link.address])
    answer = rig.primary.begin_put(b"1")
    rig.objects.wait_for(lambda: rig.objects.calls.count(("replace", LINK)) >= 2)
    assert rig.member.received.last(rig.primary.store.identity.number, 1)
    assert not answer.done()
    rig.primary.release_segments()
    answer.result(WAIT_S)


def test_a_sealed_register_ends_the_link_of_the_primary(rig: Rig) -> None:
    """After a takeover began, the primary names no member any more, and its acknowledgements end."""
    assert rig.other.link.begin_takeover() == 1
    rig.primary.sender.offer([rig.member.link.address])
    rig.primary.wait_for(LinkState.DOWN)
    assert "a takeover from epoch 1 began" in rig.primary.sender.status().error
    record = LinkRecord.decode(rig.objects.read(LINK))
    assert record is not None
    assert (record.member, record.is_sealed) == ("", True)


def test_a_member_acknowledges_nothing_after_its_takeover_began(rig: Rig) -> None:
    """Not in this process, and not in the next one: a stopped primary then gets no answer by the link."""
    rig.primary.connect(rig.member)
    rig.primary.put(b"1")
    assert rig.member.link.begin_takeover() == 1
    rig.primary.wait_for(LinkState.DOWN)
    rig.member.close()
    again = rig.standby("second")
    rig.primary.sender.offer([again.link.address])
    rig.objects.wait_for(lambda: "takeover" in rig.primary.sender.status().error)
    assert rig.primary.sender.status().state is LinkState.DOWN


def test_a_lost_member_is_removed_once_its_batches_are_in_the_log(tmp_path: Path) -> None:
    """The register names the member for as long as the log lacks batches that were answered on its word."""
    objects = MemoryObjects()
    with ExitStack() as stack:
        primary = LinkedStore(tmp_path / "first", objects, patience_s=0.0)
        stack.callback(primary.lose)
        member = StandbyHost(tmp_path / "second", objects)
        other = StandbyHost(tmp_path / "third", objects)
        stack.callback(other.close)
        primary.connect(member)
        primary.hold_segments()
        primary.put(b"1")
        member.close()
        answer = primary.begin_put(b"2")
        primary.wait_for(LinkState.DOWN)
        assert not answer.done()
        assert other.link.reserved_for() == member.link.address
        assert objects.calls.count(("replace", LINK)) == 1
        primary.release_segments()
        answer.result(WAIT_S)
        objects.wait_for(lambda: objects.calls.count(("replace", LINK)) >= 2)
        primary.lose()
        assert other.take_over(objects) == {b"1", b"2"}


def test_the_primary_accepts_segments_of_its_member(rig: Rig) -> None:
    """If the link breaks, the member writes its batches into the log; the primary continues after them."""
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    for number in range(5):
        rig.primary.put(b"%d" % number)
    rig.member.link.close()
    rig.primary.wait_for(LinkState.DOWN)
    answer = rig.primary.begin_put(b"5")
    rig.objects.wait_for(lambda: bool(rig.primary.log.status().error))
    before = rig.segments
    rig.member.link.put_tail()
    assert rig.segments == before + 1
    rig.primary.release_segments()
    answer.result(WAIT_S)
    rig.primary.put(b"6")
    rig.primary.close()
    assert check(rig.objects).faults == ()
    restored = restore(rig.objects, rig.folder / "restored")
    assert keys_of(restored.path) == {b"%d" % number for number in range(7)}


def test_a_clean_stop_allows_every_standby_to_take_over(rig: Rig) -> None:
    """Then the log has everything, and the register names no member."""
    rig.primary.connect(rig.member)
    rig.primary.put(b"1")
    rig.primary.close()
    assert rig.other.take_over(rig.objects) == {b"1"}


def test_a_restarted_member_takes_over(rig: Rig) -> None:
    """The received batches survive a kill of the standby."""
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    rig.primary.put(b"1")
    rig.member.close()
    rig.primary.lose()
    assert rig.standby("second").take_over(rig.objects) == {b"1"}


def test_a_restarted_primary_keeps_batches_that_only_its_member_had(rig: Rig) -> None:
    """The primary was killed, its member wrote the batches into the log, and the primary continues after them."""
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    rig.primary.put(b"1")
    rig.primary.lose()
    rig.member.link.put_tail()
    log = ReplicationLog(rig.objects, CLOCK, LogOptions(is_sync=True), lambda start: pytest.fail(f"a base: {start}"))
    Store.open(rig.primary.folder, CLOCK, batch_log=log).close()
    assert keys_of(rig.primary.folder) == {b"1"}
    assert check(rig.objects).faults == ()


def test_a_tail_without_which_the_log_continues_is_kept(rig: Rig) -> None:
    """After a takeover with accepted loss, the member follows the log and keeps its batches as a diverged store."""
    rig.primary.put(b"0")
    rig.member.standby.catch_up()
    rig.primary.connect(rig.member)
    rig.primary.hold_segments()
    for number in range(1, 4):
        rig.primary.put(b"%d" % number)
    rig.primary.lose()
    release_link(rig.objects)
    assert rig.other.take_over(rig.objects) == {b"0"}
    rig.member.standby.catch_up()
    assert rig.member.received.last(rig.primary.store.identity.number, 1) == 0
    (tail,) = diverged_tails(rig.objects, rig.member.folder)
    assert tail.batch == tail.common_batch + 3
    rig.member.close()
    assert keys_of(rig.member.folder) == {b"0"}
    (kept,) = rig.member.folder.glob("diverged-*")
    kept.rename(rig.folder / "rocksdb")
    assert keys_of(rig.folder) == {b"%d" % number for number in range(4)}
