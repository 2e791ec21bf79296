"""An object store that loses answers, refuses, or disappears: nothing is reported as written or missing wrongly."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import pytest
from support.rigs.faults.fault_proxy import Answer, FaultProxy, Held, LostAnswer, LostRequest, always, once
from support.rigs.services.object_server import S3Server

from dmq.replication.objects import ObjectStore, ReplicaRefused, ReplicaUnavailable, open_objects, probe

pytestmark = pytest.mark.fault
_WAIT_S = 60.0


@pytest.fixture
def prefix() -> str:
    """Return a prefix of this test alone."""
    return uuid4().hex


@pytest.fixture
def objects(server: S3Server, proxy: FaultProxy, prefix: str) -> ObjectStore:
    """Return objects behind the proxy."""
    return server.open(prefix, port=proxy.port)


@pytest.fixture
def direct(server: S3Server, prefix: str) -> ObjectStore:
    """Return the same objects, read without the proxy."""
    return server.open(prefix)


def test_a_lost_request_writes_nothing(objects: ObjectStore, direct: ObjectStore, proxy: FaultProxy) -> None:
    """The write is in doubt; repeated, it creates the object."""
    proxy.plan = once(LostRequest())
    with pytest.raises(ReplicaUnavailable):
        objects.create("log/1", b"mine")
    assert direct.read("log/1") is None
    assert objects.create("log/1", b"mine")


def test_a_lost_answer_leaves_the_object(objects: ObjectStore, direct: ObjectStore, proxy: FaultProxy) -> None:
    """The write is in doubt, and is not repeated unseen; repeated by the caller, it meets itself."""
    proxy.plan = once(LostAnswer())
    with pytest.raises(ReplicaUnavailable):
        objects.create("log/1", b"mine")
    assert direct.read("log/1") is not None
    assert not objects.create("log/1", b"mine")
    etag = objects.replace("lease", b"1", None)
    proxy.plan = once(LostAnswer())
    with pytest.raises(ReplicaUnavailable):
        objects.replace("lease", b"2", etag)
    found = direct.read("lease")
    assert found is not None
    assert found[0] == b"2"
    assert objects.replace("lease", b"2", etag) is None


def test_409_with_no_object_is_not_an_existing_one(
    objects: ObjectStore, direct: ObjectStore, proxy: FaultProxy
) -> None:
    """S3 answers 409 if conditional writes meet. The name is free, or the ETag still current: the write is repeated."""
    proxy.plan = once(Answer(409, "ConditionalRequestConflict"))
    assert objects.create("log/1", b"mine")
    proxy.plan = once(Answer(409, "ConditionalRequestConflict"))
    etag = objects.replace("lease", b"1", None)
    proxy.plan = once(Answer(409, "ConditionalRequestConflict"))
    assert objects.replace("lease", b"2", etag) is not None
    proxy.plan = once(Answer(409, "ConditionalRequestConflict"))
    assert objects.replace("lease", b"3", etag) is None
    proxy.plan = once(Answer(409, "ConditionalRequestConflict"))
    assert not objects.create("log/1", b"other")
    proxy.plan = lambda method, path: Answer(409) if method == "PUT" else None
    with pytest.raises(ReplicaUnavailable, match="conflicting writes"):
        objects.create("log/2", b"mine")
    assert direct.read("log/2") is None


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_of_a_read_is_an_unavailable_store(objects: ObjectStore, proxy: FaultProxy, status: int) -> None:
    """A service may answer any request so while another operation is in progress."""
    assert objects.create("log/1", b"mine")
    proxy.plan = always(Answer(status, "OperationAborted"))
    for call in (
        lambda: objects.read("log/1"),
        lambda: objects.list("log/"),
        lambda: objects.delete(["log/1"]),
        lambda: objects.create("log/1", b"mine"),
        lambda: objects.replace("log/1", b"mine", "x"),
    ):
        with pytest.raises(ReplicaUnavailable, match=f"{status}.*OperationAborted"):
            call()
    proxy.plan = None
    assert objects.read("log/1") is not None


@pytest.mark.parametrize(
    ("status", "code", "is_setup"),
    [
        (403, "ExpiredToken", True),
        (404, "NoSuchBucket", True),
        (404, "Unheard", True),
        (429, "SlowDown", False),
        (500, "InternalError", False),
        (501, "NotImplemented", True),
        (503, "SlowDown", False),
        (507, "InsufficientStorage", False),
    ],
)
def test_a_refusal_is_an_unavailable_store(
    objects: ObjectStore, proxy: FaultProxy, status: int, code: str, is_setup: bool
) -> None:
    """Every call reports the status and the code; none takes the answer for a missing or an existing object."""
    assert objects.create("log/1", b"mine")
    proxy.plan = always(Answer(status, code))
    for call in (
        lambda: objects.create("log/1", b"mine"),
        lambda: objects.create("log/2", b"mine"),
        lambda: objects.replace("lease", b"1", None),
        lambda: objects.read("log/1"),
        lambda: objects.list("log/"),
        lambda: objects.delete(["log/1"]),
    ):
        with pytest.raises(ReplicaUnavailable, match=f"{status}.*{code}") as unavailable:
            call()
        assert unavailable.value.is_setup == is_setup
    with pytest.raises(ReplicaRefused if is_setup else ReplicaUnavailable):
        probe(objects)
    proxy.plan = None
    assert objects.read("log/1") is not None


def test_a_delayed_write_may_land_late(server: S3Server, proxy: FaultProxy, prefix: str, direct: ObjectStore) -> None:
    """A write that its caller has given up reaches the store later. A create meets an object that exists."""
    impatient = server.open(prefix, port=proxy.port, timeout_s=0.5)
    late = Held()
    proxy.plan = once(late)
    with pytest.raises(ReplicaUnavailable):
        impatient.create("log/1", b"old primary")
    assert direct.create("log/1", b"new primary")
    late.release.set()
    assert late.done.wait(_WAIT_S)
    found = direct.read("log/1")
    assert found is not None
    assert found[0] == b"new primary"


def test_a_store_that_is_gone_comes_back(objects: ObjectStore, proxy: FaultProxy) -> None:
    """Refused connections are an unavailable store, also to the probe; the same object store works afterwards."""
    assert objects.create("log/1", b"mine")
    proxy.refuse()
    with pytest.raises(ReplicaUnavailable):  # on a connection that ends
        objects.create("log/2", b"mine")
    with pytest.raises(ReplicaUnavailable, match="Connection refused") as unavailable:
        probe(objects)
    assert not unavailable.value.is_setup
    proxy.accept()
    assert objects.list("log/") == ["log/1"]


class _Careless:
    """An object store without one of the conditional writes."""

    def __init__(self, objects: ObjectStore, ignored: str) -> None:
        self._objects = objects
        self._ignored = ignored
        self.url = objects.url
        self.read, self.list, self.delete = objects.read, objects.list, objects.delete

    def create(self, name: str, data: bytes) -> bool:
        if self._ignored == "create":
            self._objects.delete([name])
        return self._objects.create(name, data)

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        if self._ignored == "replace":
            found = self._objects.read(name)
            etag = found[1] if found else None
        return self._objects.replace(name, data, etag)


@pytest.mark.parametrize(("ignored", "part"), [("create", "overwrites"), ("replace", "old ETag")])
def test_a_store_without_conditional_writes_is_refused(direct: ObjectStore, ignored: str, part: str) -> None:
    """The start is refused by name, and nothing is left in the store."""
    with pytest.raises(ReplicaRefused, match=part):
        probe(_Careless(direct, ignored))
    assert direct.list("") == []


def test_an_exchanged_directory_is_not_an_empty_store(tmp_path: Path) -> None:
    """A file system that is no longer mounted leaves an empty directory, which is not used."""
    root = tmp_path / "mount"
    root.mkdir()
    objects = open_objects(root.as_uri())
    objects.create("log/1", b"1")
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    with pytest.raises(ReplicaUnavailable, match="still mounted"):
        objects.create("log/1", b"1")
    with pytest.raises(ReplicaUnavailable, match="still mounted"):
        objects.read("log/1")
    assert list(root.iterdir()) == []


def test_a_full_directory_leaves_no_short_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that cannot be synced is in doubt, and its name stays free."""
    objects = open_objects(tmp_path.as_uri())
    objects.create("log/1", b"1")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ReplicaUnavailable, match="No space left") as unavailable:
            objects.create("log/2", b"2" * 100)
    assert not unavailable.value.is_setup
    assert objects.list("") == ["log/1"]
    assert list((tmp_path / ".writing").iterdir()) == []


@pytest.mark.parametrize("versions", [1, 5, 200])
def test_a_stopped_writer_of_a_register_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: int) -> None:
    """A writer that is stopped between its check and its write does not win and is not read; past many versions it is
    in doubt.
    """
    slow, fast = open_objects(tmp_path.as_uri()), open_objects(tmp_path.as_uri())
    first = slow.replace("lease", b"first", None)
    link = os.link

    def stopped(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", link)
        etag = first
        for number in range(versions):
            etag = fast.replace("lease", b"fast %d" % (number + 1), etag)
            assert etag is not None
        link(source, target)

    monkeypatch.setattr(os, "link", stopped)
    with pytest.raises(ReplicaUnavailable) if versions == 200 else nullcontext():
        assert slow.replace("lease", b"slow", first) is None
    found = slow.read("lease")
    assert found is not None
    assert found[0] == b"fast %d" % versions
    assert len(list((tmp_path / "lease@").iterdir())) <= 70
