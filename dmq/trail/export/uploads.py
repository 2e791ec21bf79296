"""Copies of a cell's trail in the object store of the replica, so that a lost host loses no exported event.

Files are uploaded before their events leave the outbox. A successor fetches them before its first event: it is the same
cell, and continues the trail. Objects have the path of their file, so the copy is a trail as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from broker_adapter.runtime.log import LibraryLog
from dmq.replication.objects import ObjectStore
from dmq.store.files.durable import make_directory, sync_directory, sync_file
from dmq.trail.manifest import Layout, Listed, read_cell, read_manifest, sequences_of
from dmq.trail.snapshots import MANIFEST

log = LibraryLog("dmq.trail")

_PREFIX = "trail/"


class TrailUploads:
    """Uploads of one cell. All calls raise ``ReplicaUnavailable`` if the object store is, and may be repeated."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._manifests: dict[Path, tuple[bytes, str]] = {}  # uploaded content and its ETag
        self._known: set[str] | None = None  # uploaded files; None: not listed yet

    def send(self, layout: Layout, listed: Listed) -> None:
        """Upload one file of events, and the manifest that lists it."""
        self._send_file(layout, layout.trail / listed.path)
        self._send_manifest(layout, layout.manifest(listed.date))

    def send_missing(self, layout: Layout) -> None:
        """Upload all listed files, manifests and snapshots that the object store lacks."""
        for path in sorted(layout.manifests.glob("????-??-??.jsonl")):
            for listed in read_manifest(path)[0]:
                self._send_file(layout, layout.trail / listed.path)
            self._send_manifest(layout, path)
        self.send_snapshots(layout)

    def send_snapshots(self, layout: Layout) -> None:
        """Upload the files of new snapshots. The manifest of a snapshot follows its other files."""
        for directory in sorted(_snapshots(layout).glob("[0-9]*")):
            for path in sorted(directory.iterdir(), key=lambda each: (each.name == MANIFEST, each.name)):
                self._send_file(layout, path)

    def fetch(self, layout: Layout) -> None:
        """Write the uploaded files that the trail lacks. Events that retention removed here stay removed."""
        cell = read_cell(layout)
        retired = cell.retired_sequence if cell is not None else 0
        names = [name for folder in _folders(layout) for name in self._objects.list(f"{_PREFIX}{folder}/")]
        snapshots = {name.rpartition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
        fetched = 0
        for name in names:
            path = layout.trail / name.removeprefix(_PREFIX)
            events = sequences_of(path.name)
            is_manifest = path.parent == layout.manifests
            if is_manifest or (events is not None and events[1] > retired) or name.rpartition("/")[0] in snapshots:
                fetched += self._fetch_file(name, path, is_growing=is_manifest)
        if fetched:
            log.info("trail_fetched", cell=layout.cell, files=fetched, url=self._objects.url)

    def retire(self, layout: Layout) -> None:
        """Delete the uploaded files that retention removed from the trail."""
        dates = [path.stem for path in layout.manifests.glob("????-??-??.jsonl")]
        kept = sorted(path.name for path in _snapshots(layout).glob("[0-9]*"))
        gone = []
        for folder in _folders(layout):
            for name in self._objects.list(f"{_PREFIX}{folder}/"):
                part = name.removeprefix(f"{_PREFIX}{folder}/").partition("/")[0]
                if folder.startswith("snapshots"):
                    is_gone = bool(kept) and part < kept[-1] and part not in kept
                else:
                    is_gone = bool(dates) and part.removeprefix("date=").removesuffix(".jsonl") < min(dates)
                if is_gone:
                    gone.append(name)
        self._objects.delete(gone)
        if self._known is not None:
            self._known -= set(gone)

    def _send_file(self, layout: Layout, path: Path) -> None:
        name = _PREFIX + layout.relative(path)
        if self._known is None:
            self._known = {each for folder in _folders(layout) for each in self._objects.list(f"{_PREFIX}{folder}/")}
        if name in self._known:
            return
        data = path.read_bytes()
        if not self._objects.create(name, data):
            found = self._objects.read(name)
            if found is not None and found[0] != data:  # a replaced primary exported other events before it noticed
                log.error("trail_object_conflict", name=name, url=self._objects.url)
        self._known.add(name)

    def _send_manifest(self, layout: Layout, path: Path) -> None:
        name, data = _PREFIX + layout.relative(path), path.read_bytes()
        known = self._manifests.get(path)
        while known is None or known[0] != data:
            etag = self._objects.replace(name, data, known[1] if known else None)
            known = (data, etag) if etag is not None else self._objects.read(name)
        self._manifests[path] = known

    def _fetch_file(self, name: str, path: Path, *, is_growing: bool) -> bool:
        """Write a file unless it exists. Of a manifest, the longer version is kept."""
        if path.exists() and not is_growing:
            return False
        found = self._objects.read(name)
        if found is None:
            return False
        if path.exists() and not (found[0].startswith(old := path.read_bytes()) and len(found[0]) > len(old)):
            return False
        make_directory(path.parent)
        part = path.with_name(f".{path.name}.tmp")
        part.write_bytes(found[0])
        sync_file(part)
        part.replace(path)
        sync_directory(path.parent)
        return True


def _snapshots(layout: Layout) -> Path:
    return layout.trail / "snapshots" / f"cell={layout.cell}"


def _folders(layout: Layout) -> Iterator[str]:
    """Yield the folders of the cell: events first, so that a manifest never lists a file that was not fetched."""
    for directory in (layout.events, layout.manifests, _snapshots(layout)):
        yield layout.relative(directory)
