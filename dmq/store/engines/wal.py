"""Check of the write-ahead log's end before RocksDB replays it, since RocksDB skips a torn record silently.

    log        blocks of 32768 bytes; a block ends in up to 6 zero bytes where no header fits
    fragment   checksum 4 | length 2 (little-endian) | type 1 | data       1 whole record, 2 first, 3 middle, 4 last

An incomplete record was being written when the process or the machine died, so its commit was never acknowledged.
Recovery may cut it from the *newest* log. In an older log, with records after it, it is damage that RocksDB would skip.
Checksums are left to RocksDB: it refuses a complete record with a wrong checksum.
"""

from __future__ import annotations

from pathlib import Path

from dmq.errors import StoreCorrupt

BLOCK_BYTES = 32_768
HEADER_BYTES = 7
_MIDDLES = (2, 3)  # fragment types that do not end a record


def check_logs(directory: Path) -> int:
    """Return the number of bytes that recovery cuts from the end of the log.

    Raise ``StoreCorrupt`` if a record is torn before the end.
    """
    logs = sorted((path for path in directory.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))
    cut_bytes = 0
    for path in logs:
        size = path.stat().st_size
        if cut_bytes and size:
            raise StoreCorrupt(f"a log before {path} ends {cut_bytes} bytes into a record, and more was written after")
        cut_bytes = cut_bytes or torn_bytes(path)
    return cut_bytes


def torn_bytes(path: Path) -> int:
    """Return the number of bytes after the last complete record of a log; trailing zero bytes alone count as 0."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start, end = size, 0
        while start and not end:  # a torn record may span many blocks: search backwards
            start = (start - 1) // BLOCK_BYTES * BLOCK_BYTES
            file.seek(start)
            end = _end_of_records(file.read(min(BLOCK_BYTES, size - start)))
        whole = start + end
        if BLOCK_BYTES - whole % BLOCK_BYTES < HEADER_BYTES:
            whole += BLOCK_BYTES - whole % BLOCK_BYTES
        file.seek(whole)
        return size - whole if file.read().strip(b"\0") else 0


def _end_of_records(block: bytes) -> int:
    """Return the end of the last record that ends in this block, or 0 if none does."""
    at = end = 0
    while at + HEADER_BYTES <= len(block):
        length = int.from_bytes(block[at + 4 : at + 6], "little")
        kind = block[at + 6]
        at += HEADER_BYTES + length
        if at > len(block) or (kind == 0 and length == 0):
            break
        if kind not in _MIDDLES:
            end = at
    return end
