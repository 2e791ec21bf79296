"""The contract of an object store, for a directory and for a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch
from uuid import uuid4

import pytest
from support.effort import EFFORT
from support.rigs.services.object_server import BUCKET, S3Server

from dmq.replication.objects import ObjectStore, ReplicaRefused, ReplicaUnavailable, open_objects, probe

pytestmark = pytest.mark.contract
Open = Callable[[], ObjectStore]
_RACES = 20 * EFFORT
_WAIT_S = 120.0


@pytest.fixture(params=["directory", "s3"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open the same objects each time it is called, as each of several processes does."""
    if request.param == "directory":
        return lambda: open_objects(tmp_path.as_uri())
    server: S3Server = request.getfixturevalue("server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{uuid4().hex}"
    return lambda: open_objects(url)


@pytest.fixture
def objects(open_store: Open) -> ObjectStore:
    """Return an empty object store."""
    return open_store()


def test_an_object_is_created_once(objects: ObjectStore) -> None:
    """The second create is refused and changes nothing; the name may have folders, the content any bytes."""
    for name, data in (("one", b""), ("log/000001", b"\0first"), ("a/b/c", b"x" * 3_000_000)):
        assert objects.create(name, data)
        assert not objects.create(name, b"other")
        found = objects.read(name)
        assert found is not None
        assert found[0] == data


def test_a_missing_object_is_none(objects: ObjectStore) -> None:
    """A read of a name that does not exist is no error, neither is its deletion."""
    assert objects.read("none") is None
    assert objects.read("log/none") is None
    assert objects.list("") == objects.list("log/") == []
    objects.delete(["none", "log/none"])


def test_a_register_is_replaced_by_its_etag_alone(objects: ObjectStore) -> None:
    """Only the current ETag replaces; None only creates. A read returns the ETag of the last write."""
    first = objects.replace("lease", b"1", None)
    assert first is not None
    assert objects.replace("lease", b"2", None) is None
    assert objects.read("lease") == (b"1", first)
    second = objects.replace("lease", b"2", first)
    assert second is not None
    assert second != first
    assert objects.replace("lease", b"3", first) is None
    assert objects.replace("none", b"3", first) is None
    assert objects.read("lease") == (b"2", second)
    for number in range(5):
        found = objects.read("lease")
        assert found is not None
        assert objects.replace("lease", b"%d" % number, found[1])
    objects.delete(["lease"])
    assert objects.read("lease") is None
    assert objects.replace("lease", b"1", second) is None
    assert objects.replace("lease", b"1", None) is not None


def test_names_are_listed_in_order_from_a_name_on(objects: ObjectStore) -> None:
    """A list has the names of one folder and its folders, sorted, after a name; registers are names like others."""
    for number in (5, 3, 12, 1):
        objects.create(f"log/{number:03}", b"")
    objects.create("log/tables/t", b"")
    objects.replace("log-lease", b"", None)
    assert objects.list("log/") == ["log/001", "log/003", "log/005", "log/012", "log/tables/t"]
    assert objects.list("log/", "log/003") == ["log/005", "log/012", "log/tables/t"]
    assert objects.list("log/", "log/004") == ["log/005", "log/012", "log/tables/t"]
    assert objects.list("log/", "log/tables/t") == []
    assert objects.list("") == ["log-lease", *objects.list("log/")]
    objects.delete(["log/003", "log/tables/t"])
    assert objects.list("log/") == ["log/001", "log/005", "log/012"]


def test_prefixes_do_not_meet(objects: ObjectStore, open_store: Open) -> None:
    """A second view of the same URL sees every write at once."""
    other = open_store()
    assert objects.create("a", b"1")
    assert other.read("a") is not None
    assert other.list("") == ["a"]
    assert not other.create("a", b"2")


def test_the_probe_accepts_and_leaves_nothing(objects: ObjectStore) -> None:
    """A store with conditional writes passes, and has no object afterwards."""
    probe(objects)
    assert objects.list("") == []


def _race(url: str, environment: dict[str, str], start: object, results: object, number: int) -> None:
    """Write one name of each kind for each round, and report the rounds that this process won."""
    with patch.dict(os.environ, environment):
        objects = open_objects(url)
    start.wait(_WAIT_S)  # type: ignore[attr-defined]
    data = b"%d" % number
    created = [each for each in range(_RACES) if objects.create(f"race/{each}", data)]
    replaced = 0
    while replaced < _RACES:
        found = objects.read("register")
        content, etag = found or (b"", None)
        replaced += objects.replace("register", content + data, etag) is not None
    results.put((number, created))  # type: ignore[attr-defined]


def test_one_process_wins_each_race(objects: ObjectStore, open_store: Open) -> None:
    """Of three processes, one creates each name, and no replacement of a register is lost."""
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    racers = [
        spawn.Process(target=_race, args=(objects.url, environment, start, results, number)) for number in range(3)
    ]
    for racer in racers:
        racer.start()
    won = dict(results.get(timeout=_WAIT_S) for _ in racers)
    for racer in racers:
        racer.join(_WAIT_S)
    assert sorted(name for names in won.values() for name in names) == list(range(_RACES))
    for number, names in won.items():
        for name in names:
            found = objects.read(f"race/{name}")
            assert found is not None
            assert found[0] == b"%d" % number
    register = objects.read("register")
    assert register is not None
    assert sorted(register[0]) == sorted(b"012" * _RACES)


def test_threads_share_an_object_store(objects: ObjectStore) -> None:
    """Calls of many threads at once all complete."""
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda number: objects.create(f"t/{number}", b"x"), range(64)))
    assert len(objects.list("t/")) == 64


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("s3://key:secret-word@bucket/x", "credentials"),
        ("s3://bucket/x?key=secret-word", "credentials"),
        ("ftp://host/x", "unknown scheme"),
        ("orders", "unknown scheme"),
        ("file://host/x", "absolute path"),
        ("file:///does/not/exist", "does not exist"),
    ],
)
def test_a_wrong_url_is_refused(url: str, part: str) -> None:
    """The error names the problem, and never shows credentials."""
    with pytest.raises(ReplicaRefused, match=part) as refused:
        open_objects(url)
    assert "secret-word" not in str(refused.value)


@pytest.mark.parametrize(
    ("bucket", "changes", "part"),
    [
        ("missing-bucket", {}, "NoSuchBucket"),
        (BUCKET, {"AWS_SECRET_ACCESS_KEY": "another-secret"}, "403 Forbidden: SignatureDoesNotMatch"),
        (BUCKET, {"AWS_ACCESS_KEY_ID": "another-key"}, "404 Not Found: XAdminUserNotFound"),
    ],
)
def test_a_wrong_setup_is_refused_at_start(server: S3Server, bucket: str, changes: dict[str, str], part: str) -> None:
    """A missing bucket and wrong credentials are never an empty store; the error has the store's code, no secret."""
    with patch.dict(os.environ, server.environment() | changes):
        objects = open_objects(f"s3://{bucket}/x")
    for read in (lambda: objects.read("log/1"), lambda: objects.list("log/")):
        with pytest.raises(ReplicaUnavailable) as unavailable:
            read()
        assert unavailable.value.is_setup
    with pytest.raises(ReplicaRefused, match=part) as refused:
        probe(objects)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
