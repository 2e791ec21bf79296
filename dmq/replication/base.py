"""Bases: checkpoints of the database in the object store.

base/<batch>-<epoch>-<time_ms>       manifest of a base, written last: its position in the log, and its files
files/<blake2b>                      content of a file, shared by all bases that have it
verified/<batch>-<epoch>-<time_ms>   exists once a restore of the base was checked

RocksDB never modifies a finished table, so a base uploads only the tables that no earlier base has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dmq.errors import FormatUnsupported, ReplicaDamaged, StoreCorrupt
from dmq.replication.following import read_segment
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import PREFIX as LOG_PREFIX
from dmq.replication.segment import number_of
from dmq.store import database_files
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.files.durable import sync_directory, sync_file
from dmq.store.schema.cell.position import Position, decode_position
from dmq.store.schema.keys import FORMAT_VERSION, META_FORMAT, META_POSITION, Family, unpack_u64
from dmq.version import version_here

PREFIX, FILES, VERIFIED = "base/", "files/", "verified/"
VERSION = 1
_NAME = re.compile(r"base/([0-9]{20})-([0-9]{10})-([0-9]{13})")
_ROCKSDB_VERSION = re.compile(r"^\s*rocksdb_version=(\S+)", re.MULTILINE)
_DIGEST_BYTES = 32


class BaseFile(msgspec.Struct, frozen=True):
    """File of a base; ``content`` is the hash of its bytes."""

    name: str
    content: str
    size_bytes: int


class Base(msgspec.Struct, frozen=True):
    """Manifest of a base."""

    version: int
    product: str  # version of Rock-DMQ that made it
    rocksdb: str
    format_version: int
    store: int
    epoch: int
    number: int  # of the last segment before it; the segments after it follow
    checksum: str  # of that segment
    batch: int  # last one in it
    time_ms: int
    files: tuple[BaseFile, ...]

    @property
    def suffix(self) -> str:
        """Name of the base in the log."""
        return f"{self.batch:020d}-{self.epoch:010d}-{self.time_ms:013d}"

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return sum(each.size_bytes for each in self.files)


class Uploaded(msgspec.Struct, frozen=True):
    """Result of an upload: last batch of the base, and the sizes of the base and of the new files."""

    batch: int
    size_bytes: int
    sent_bytes: int


class BaseName(msgspec.Struct, frozen=True, order=True):
    """Base in a listing, ordered by position."""

    batch: int
    epoch: int
    time_ms: int

    @property
    def suffix(self) -> str:
        """Part of the object's name that the manifest and the mark of verification share."""
        return f"{self.batch:020d}-{self.epoch:010d}-{self.time_ms:013d}"


def position_of(database: Path) -> tuple[Position, int]:
    """Return the position row and the format version of a database at rest."""
    engine = RocksEngine(database, RocksOptions(is_read_only=True))
    try:
        row, version = engine.get_many(Family.META, [META_POSITION, META_FORMAT])
    finally:
        engine.close()
    if row is None or version is None:
        raise StoreCorrupt(f"{database} has no position in a replication log")
    return decode_position(row), unpack_u64(version)


def upload(objects: ObjectStore, database: Path, time_ms: int) -> Uploaded:
    """Upload a checkpoint as a base. An equal base that is already there is kept."""
    position, format_version = position_of(database)
    there = set(objects.list(FILES))
    files: list[BaseFile] = []
    sent_bytes = 0
    for path in database_files(database):
        data = path.read_bytes()
        content = _hash(data)
        files.append(BaseFile(path.name, content, len(data)))
        if FILES + content not in there:
            objects.create(FILES + content, data)  # False: another base has it since
            sent_bytes += len(data)
    base = Base(
        version=VERSION,
        product=version_here(),
        rocksdb=_rocksdb_version(database),
        format_version=format_version,
        store=position.store,
        epoch=position.epoch,
        number=position.number,
        checksum=position.checksum.hex(),
        batch=position.batch,
        time_ms=time_ms,
        files=tuple(files),
    )
    if not any((each.batch, each.epoch) == (base.batch, base.epoch) for each in list_bases(objects)):
        objects.create(PREFIX + base.suffix, msgspec.json.encode(base))
        # A replaced primary may have pruned files that no manifest named yet.
        for name in missing_objects(objects, base):
            file = next(each for each in files if FILES + each.content == name)
            objects.create(name, (database / file.name).read_bytes())
    return Uploaded(base.batch, base.size_bytes, sent_bytes)


def list_bases(objects: ObjectStore) -> list[BaseName]:
    """Return the bases, oldest first."""
    found = (_NAME.fullmatch(each) for each in objects.list(PREFIX))
    return sorted(BaseName(int(each[1]), int(each[2]), int(each[3])) for each in found if each is not None)


def read_base(objects: ObjectStore, name: BaseName) -> Base:
    """Return the manifest of a base. Raise ``FormatUnsupported`` if it is newer, ``ReplicaDamaged`` if invalid."""
    found = objects.read(PREFIX + name.suffix)
    if found is None:
        raise ReplicaDamaged(f"{PREFIX}{name.suffix} is missing")
    try:
        version = msgspec.json.decode(found[0])["version"]
        if version > VERSION:
            raise FormatUnsupported(f"{PREFIX}{name.suffix} has version {version}, this Rock-DMQ knows {VERSION}")
        base = msgspec.json.decode(found[0], type=Base)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ReplicaDamaged(f"{PREFIX}{name.suffix} cannot be read: {error}") from error
    if base.format_version > FORMAT_VERSION:
        why = f"of format version {base.format_version}, this Rock-DMQ knows {FORMAT_VERSION}"
        raise FormatUnsupported(f"{PREFIX}{name.suffix} is {why}")
    return base


def newest_base(objects: ObjectStore, until_ms: int) -> Base | None:
    """Return the newest base at or before a time that the log continues; None if there is none."""
    for name in reversed(list_bases(objects)):
        if name.time_ms <= until_ms:
            base = read_base(objects, name)
            if not is_diverged(objects, base):
                return base
    return None


def is_diverged(objects: ObjectStore, base: Base) -> bool:
    """Return True if a primary made the base that was replaced before the log had all batches of the base."""
    number = base.number + 1
    while (segment := read_segment(objects, number)) is not None and segment.head.first_batch <= base.batch:
        if segment.head.epoch != base.epoch:
            return True
        number += 1
    return False


def download(objects: ObjectStore, base: Base, database: Path) -> None:
    """Write the files of a base to the new directory ``database``, durable on return."""
    database.mkdir(mode=0o700)
    for each in base.files:
        found = objects.read(FILES + each.content)
        if found is None:
            raise ReplicaDamaged(f"{FILES}{each.content} is missing, and {PREFIX}{base.suffix} needs it")
        data = found[0]
        if _hash(data) != each.content or len(data) != each.size_bytes or Path(each.name).name != each.name:
            raise ReplicaDamaged(f"{FILES}{each.content} has other bytes than {PREFIX}{base.suffix} names")
        path = database / each.name
        path.write_bytes(data)
        path.chmod(0o600)
        sync_file(path)
    sync_directory(database)


def mark_verified(objects: ObjectStore, suffix: str) -> None:
    """Note that a restore of the base with this name was checked."""
    objects.create(VERIFIED + suffix, b"")


def verified(objects: ObjectStore) -> set[str]:
    """Return the suffixes of the verified bases."""
    return {each.removeprefix(VERIFIED) for each in objects.list(VERIFIED)}


def prune(objects: ObjectStore, keep_from_ms: int, *, needs_verified: bool) -> int:
    """Remove everything that no restore to a time since ``keep_from_ms`` needs; return the number of objects.

    The newest base that was verified, and everything after it, stays. Without ``needs_verified`` every base counts as
    verified. Manifests are removed first, so a base that is listed is whole.
    """
    names = list_bases(objects)
    marks = verified(objects)
    older = [
        each
        for each in names
        if each.time_ms <= keep_from_ms
        and (not needs_verified or each.suffix in marks)
        and not is_diverged(objects, read_base(objects, each))
    ]
    if not older:
        return 0
    first = older[-1]  # newest base that restores the begin of the window
    kept = [each for each in names if each >= first]
    gone = [each for each in names if each < first]
    manifests = [read_base(objects, each) for each in kept]
    needed = {FILES + each.content for base in manifests for each in base.files}
    floor = min(base.number for base in manifests)
    removed = [PREFIX + each.suffix for each in gone] + [VERIFIED + each.suffix for each in gone]
    objects.delete(removed)
    segments = [each for each in objects.list(LOG_PREFIX) if (number_of(each) or floor) < floor]
    files = [each for each in objects.list(FILES) if each not in needed]
    objects.delete(segments)
    objects.delete(files)
    return len(gone) + len(segments) + len(files)


def missing_objects(objects: ObjectStore, base: Base) -> Sequence[str]:
    """Return the names of the base's files that are not in the object store."""
    there = set(objects.list(FILES))
    return sorted({FILES + each.content for each in base.files} - there)


def _rocksdb_version(database: Path) -> str:
    for path in sorted(database.glob("OPTIONS-*")):
        if match := _ROCKSDB_VERSION.search(path.read_text(encoding="utf-8", errors="replace")):
            return match[1]
    return ""


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
