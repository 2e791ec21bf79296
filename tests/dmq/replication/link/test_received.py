"""Batches in the directory of a standby: restarts, cut and damaged files, copies of the directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dmq.errors import ReplicaDamaged
from dmq.replication.link.frames import LinkBroken, LinkFrame, encode
from dmq.replication.link.received import ReceivedBatches, following

pytestmark = pytest.mark.integration
STORE = 7


Opener = Callable[..., ReceivedBatches]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Return the function that opens the received batches of a directory; all are closed at the end."""
    with ExitStack() as stack:
        yield lambda folder=tmp_path, makes=True: stack.enter_context(closing(ReceivedBatches(folder, makes=makes)))


def add(received: ReceivedBatches, first: int, *batches: bytes, stored: int = 0) -> int:
    """Add a frame."""
    frame = LinkFrame(first, stored, 1_000 + first, list(batches))
    return received.add(frame, encode(frame))


def found(received: ReceivedBatches, epoch: int = 1, after: int = 0) -> list[tuple[int, bytes]]:
    """Return the batches of an epoch."""
    return [(each.number, each.data) for each in following(received.after(STORE, epoch, after), after)]


def file_of(folder: Path) -> Path:
    """Return the last file with batches."""
    return max(folder.glob("link/*-*"))


def test_batches_survive_a_restart(opened: Opener) -> None:
    """A new process has the same member id and all added batches, also those of several connections."""
    first = opened()
    assert first.begin(STORE, 1) == 0
    assert add(first, 1, b"a", b"b") == 2
    assert first.begin(STORE, 1) == 2
    assert add(first, 3, b"c") == 3
    second = opened(makes=False)
    assert second.member == first.member != ""
    assert found(second) == [(1, b"a"), (2, b"b"), (3, b"c")]
    assert found(second, after=2) == [(3, b"c")]
    assert (second.last(STORE, 1), second.last(STORE, 2), second.last(8, 1)) == (3, 0, 0)
    assert second.begin(STORE, 1) == 3
    assert [each.time_ms for each in second.after(STORE, 1, 0)] == [1_001, 1_001, 1_003]


def test_a_directory_without_a_link_has_no_member(tmp_path: Path, opened: Opener) -> None:
    """Nothing is created, and nothing is received."""
    received = opened(makes=False)
    assert received.member == ""
    assert found(received) == []
    assert list(tmp_path.iterdir()) == []


def test_a_copied_directory_is_another_member(tmp_path: Path, opened: Opener) -> None:
    """The original has batches that the copy lacks, so the copy must not take over in its name."""
    original = opened(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    assert opened(tmp_path / "second").member != original.member


def test_every_cut_of_the_last_frame_is_a_shorter_file(tmp_path: Path, opened: Opener) -> None:
    """A kill while a frame is written leaves the acknowledged ones, and the next process continues after them."""
    received = opened()
    received.begin(STORE, 1)
    add(received, 1, b"a")
    size = file_of(tmp_path).stat().st_size
    add(received, 2, b"b")
    whole = file_of(tmp_path).read_bytes()
    for cut in range(size, len(whole)):
        file_of(tmp_path).write_bytes(whole[:cut])
        assert found(opened()) == [(1, b"a")]
    again = opened()
    assert again.begin(STORE, 1) == 1
    add(again, 2, b"b")
    assert found(opened()) == [(1, b"a"), (2, b"b")]


def test_every_changed_bit_before_the_last_frame_is_damage(tmp_path: Path, opened: Opener) -> None:
    """A changed frame is never left out silently."""
    received = opened()
    received.begin(STORE, 1)
    add(received, 1, b"a")
    size = file_of(tmp_path).stat().st_size
    add(received, 2, b"b")
    whole = file_of(tmp_path).read_bytes()
    for place in range(4, size):
        changed = bytearray(whole)
        changed[place] ^= 1
        file_of(tmp_path).write_bytes(changed)
        with pytest.raises(ReplicaDamaged):
            found(received)


def test_a_missing_file_is_damage(tmp_path: Path, opened: Opener) -> None:
    """Batches with a gap that the log does not fill are refused."""
    received = opened()
    for number in (1, 2, 3):
        received.begin(STORE, 1)
        add(received, number, b"v")
    sorted(tmp_path.glob("link/*-*"))[1].unlink()
    again = opened()
    assert found(again, after=2) == [(3, b"v")]
    with pytest.raises(ReplicaDamaged, match="batches 2 to 2 of the direct link are missing"):
        found(again)


def test_files_that_the_log_has_are_removed(tmp_path: Path, opened: Opener) -> None:
    """Those of earlier connections go once the primary reports their batches as stored; the current one stays."""
    received = opened()
    for number in (1, 2, 3):
        received.begin(STORE, 1)
        add(received, number, b"v")
    add(received, 4, stored=2)
    assert len(list(tmp_path.glob("link/*-*"))) == 1
    assert found(received, after=2) == [(3, b"v")]


def test_batches_of_earlier_epochs_are_dropped(opened: Opener) -> None:
    """Also those of the current connection, which then accepts no more."""
    received = opened()
    received.begin(STORE, 1)
    add(received, 1, b"a")
    received.drop_before(STORE, 1)
    assert found(received) == [(1, b"a")]
    received.drop_before(STORE, 2)
    assert found(received) == []
    with pytest.raises(LinkBroken, match="later epoch"):
        add(received, 2, b"b")
