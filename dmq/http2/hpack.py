"""HPACK (RFC 7541), lazily: header values stay as they came, and only those that somebody asks for are decoded.

A *wire value* is what stands in the block: a length, its Huffman flag, and that many bytes. Decoding all of them would
cost twice what everything else about a call costs. Names are decoded, since a rule hangs on each; there are few.

The dynamic table needs the decoded size of its entries only to know what has been evicted. It is enough not to evict
too early: indices count from the newest entry, so an encoder that keeps to the rules sees no difference if older
entries are still there. So sizes are lower bounds, and the table is a superset of the true one. Its memory stays
bounded: a value of n bytes of Huffman code is at least n * 8 / 30 characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from dmq.http2.errors import Code, ConnectionFault, HpackFault
from dmq.http2.huffman import decode as huffman_decode
from dmq.http2.huffman import encode as huffman_encode

TABLE_BYTES: Final = 4096  # the default; telling clients 0 makes their blocks six times as long
_ENTRY_BYTES: Final = 32  # what an entry counts beside its text
_INTEGER_MAX: Final = 2**31
_KEPT_NAME_BYTES: Final = 64
_KEPT_NAMES: Final = 4096
_KEPT_VALUE_BYTES: Final = 256
NAME_BYTES_MAX: Final = 4096  # of names in one block that were not seen before: each byte costs 0.2 us
_CODE_BYTES_MAX: Final = 8192  # of one value; the same cost
_COUNTED_BYTES: Final = 1024  # the fields of a block are counted after so many bytes

_STATIC_FIELDS = """\
:authority |:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|:status 204|\
:status 206|:status 304|:status 400|:status 404|:status 500|accept-charset |accept-encoding gzip, deflate|\
accept-language |accept-ranges |accept |access-control-allow-origin |age |allow |authorization |cache-control |\
content-disposition |content-encoding |content-language |content-length |content-location |content-range |\
content-type |cookie |date |etag |expect |expires |from |host |if-match |if-modified-since |if-none-match |if-range |\
if-unmodified-since |last-modified |link |location |max-forwards |proxy-authenticate |proxy-authorization |range |\
referer |refresh |retry-after |server |set-cookie |strict-transport-security |transfer-encoding |user-agent |vary |\
via |www-authenticate """


# Name, wire value, and what the field counts: of the tables' entries, and of a block's fields.
Field = tuple[str, bytes, int]


def _static() -> list[Field]:
    fields = [("", b"", 0)]  # indices start at 1
    for field in _STATIC_FIELDS.split("|"):
        name, _, value = field.partition(" ")
        fields.append((name, bytes((len(value),)) + value.encode(), _ENTRY_BYTES + len(name) + len(value)))
    return fields


STATIC: Final = _static()
_STATIC_SIZE: Final = len(STATIC) - 1
_NEWEST: Final = 0x80 + len(STATIC)  # the byte that stands for the newest entry of the dynamic table

# Wire form of names seen before. Bounded in number and length, whatever peers send.
_names: dict[bytes, str] = {}


class Decoder:
    """Decodes the header blocks of one connection, in the order they came, refused streams' too."""

    __slots__ = ("_entries", "_fields_max", "_list_bytes_max", "_size", "_size_max", "largest", "name_bytes_left")

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._entries: list[Field] = []  # the newest last
        self._size = 0
        self._size_max = TABLE_BYTES
        self.largest = 64  # what the largest entry counted that ever was in a table
        self.name_bytes_left = NAME_BYTES_MAX  # of new names in the current block
        self._fields_max = max(_COUNTED_BYTES, list_bytes_max // _ENTRY_BYTES)

    def decode(self, block: bytes) -> tuple[tuple[str, ...], tuple[bytes, ...], bool]:
        """Return names, wire values, and whether the list is within its bound.

        If it is not, names and values are left out; the table then is what it must be all the same. Raises HpackFault,
        and ConnectionFault for a block that would cost more than its bound: too many fields, or new names without end.
        """
        fields: list[Field] = []
        append = fields.append
        entries = self._entries
        at, end = 0, len(block)
        self.name_bytes_left = NAME_BYTES_MAX
        try:
            while at < end:
                stop = end if end - at <= _COUNTED_BYTES else at + _COUNTED_BYTES
                while at < stop:
                    first = block[at]
                    if first > 0x80:
                        if first >= _NEWEST:
                            if first == 0xFF:
                                index, at = _integer(block, at + 1, 0x7F)
                                append(self._entry(index))
                                continue
                            append(entries[_NEWEST - 1 - first])
                        else:
                            append(STATIC[first - 0x80])
                        at += 1
                    elif first & 0xE0 != 0x20:
                        field, at = self._literal(block, at)
                        append(field)
                    elif fields:
                        raise HpackFault("a change of the table's size inside a block")
                    else:
                        at = self._resize(block, at)
                if at < end and len(fields) > self._fields_max:
                    raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block of too many fields")
        except IndexError:  # asked for beforehand, it would cost as much as the rest of a field
            raise HpackFault("an index that is in no table") from None
        if not fields:
            return (), (), True
        # The bound from above is enough for almost every block, and costs less than a sum.
        if end + len(fields) * self.largest > self._list_bytes_max and not self._is_in_bounds(fields):
            return (), (), False
        names, values, _ = zip(*fields, strict=True)
        return names, values, True

    @property
    def table_bytes(self) -> int:
        """What the entries of the dynamic table take, by its own count."""
        return self._size

    def _is_in_bounds(self, fields: list[Field]) -> bool:
        return sum(len(name) + len(wire) + _ENTRY_BYTES for name, wire, _ in fields) <= self._list_bytes_max

    def _literal(self, block: bytes, at: int) -> tuple[Field, int]:
        first = block[at]
        if first == 0x80:
            raise HpackFault("an index that is in no table")
        mask = 0x3F if first & 0x40 else 0x0F
        index = first & mask
        at += 1
        if index == mask:
            index, at = _integer(block, at, mask)
        if index == 0:
            start = at
            at, _ = _text_end(block, at)
            name = self._name(block[start:at])
        else:
            name = self._entry(index)[0]
        start = at
        length = block[at] & 0x7F if at < len(block) else 0x7F
        at += 1 + length
        if length == 0x7F or at > len(block):  # a long text, or one that is cut off
            at, length = _text_end(block, start)
        wire = block[start:at]
        if wire[0] & 0x80:
            length = (length * 8 - 7) // 30 if length else 0  # the longest code has 30 bits, padding 7
        field = (name, wire, _ENTRY_BYTES + len(name) + length)
        if first & 0x40:
            self._insert(field)
        return field, at

    def _entry(self, index: int) -> Field:
        if index <= _STATIC_SIZE:
            return STATIC[index]
        if index - _STATIC_SIZE > len(self._entries):
            raise HpackFault("an index that is in no table")
        return self._entries[_STATIC_SIZE - index]

    def _name(self, wire: bytes) -> str:
        name = _names.get(wire)
        if name is None:
            self.name_bytes_left -= len(wire)
            if self.name_bytes_left < 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "new header names of too many bytes")
            name = _new_name(wire)
        return name

    def _insert(self, field: Field) -> None:
        kept = _ENTRY_BYTES + len(field[0]) + len(field[1])
        if kept > self.largest:  # noqa: PLR1730 - of every call, and max() costs more
            self.largest = kept
        entries = self._entries
        entries.append(field)
        size, size_max = self._size + field[2], self._size_max
        while size > size_max:
            size -= entries.pop(0)[2]
        self._size = size

    def _resize(self, block: bytes, at: int) -> int:
        size = block[at] & 0x1F
        at += 1
        if size == 0x1F:
            size, at = _integer(block, at, 0x1F)
        if size > TABLE_BYTES:
            raise HpackFault("a table larger than the one we offered")
        self._size_max = size
        while self._size > size:
            self._size -= self._entries.pop(0)[2]
        return at


def _integer(block: bytes, at: int, start: int) -> tuple[int, int]:
    """Return the integer whose prefix was full, and where it ends."""
    if at < len(block) and (byte := block[at]) < 0x80:  # most end here
        return start + byte, at + 1
    value = start
    shift = 0
    while True:
        if at >= len(block):
            raise HpackFault("a block that ends inside a number")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise HpackFault("a number that is too long")
    if value > _INTEGER_MAX:
        raise HpackFault("a number that is too large")
    return value, at


def _text_end(block: bytes, at: int) -> tuple[int, int]:
    """Return where the text at ``at`` ends, and its length."""
    if at >= len(block):
        raise HpackFault("a block that ends before a text")
    length = block[at] & 0x7F
    at += 1
    if length == 0x7F:
        length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackFault("a block that ends inside a text")
    return end, length


def _text(wire: bytes) -> bytes:
    end, length = _text_end(wire, 0)
    raw = wire[end - length : end]
    if length > _CODE_BYTES_MAX and wire[0] & 0x80:
        raise HpackFault("a value in Huffman code that is too long to decode")
    return huffman_decode(raw) if wire[0] & 0x80 else raw


def _new_name(wire: bytes) -> str:
    name = _text(wire).decode("latin-1")
    if len(wire) <= _KEPT_NAME_BYTES:
        if len(_names) >= _KEPT_NAMES:
            _names.clear()
        _names[wire] = name
    return name


def list_size(names: Iterable[str], values: Iterable[bytes]) -> int:
    """Return what a list counts: names, values as they came, and 32 for each field."""
    return sum(len(name) + len(wire) + _ENTRY_BYTES for name, wire in zip(names, values, strict=True))


def value_of(wire: bytes) -> str:
    """Decode a wire value. Raises HpackFault for wrong Huffman code, long after the block was taken.

    What is not UTF-8 and what HTTP forbids in a value (NUL, CR, LF) comes out as U+FFFD.
    """
    return _kept_value(wire) if len(wire) <= _KEPT_VALUE_BYTES else value_of_once(wire)


def wires_of(text: str) -> frozenset[bytes]:
    """Return a short text as wire values, plain and in Huffman code: what can be told without decoding."""
    plain = text.encode()
    code = huffman_encode(plain)
    return frozenset({bytes((len(plain),)) + plain, bytes((0x80 | len(code),)) + code})


def value_of_once(wire: bytes) -> str:
    """As ``value_of``, for a value that will hardly come again."""
    text = _text(wire).decode("utf-8", "replace")
    if "\n" in text or "\r" in text or "\0" in text:
        text = text.translate({0: "\ufffd", 10: "\ufffd", 13: "\ufffd"})
    return text


# A client's id, language, version and the like come with every call. Bounded: 4096 values of 256 bytes.
_kept_value = lru_cache(maxsize=4096)(value_of_once)


def literal(name: str, value: bytes) -> bytes:
    """Encode a field without any table, for constant blocks: the peer's state does not change."""
    return b"\0" + _plain(name.encode()) + _plain(value)


def _plain(text: bytes) -> bytes:
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    made = bytearray((0x7F,))
    while length >= 0x80:
        made.append(length & 0x7F | 0x80)
        length >>= 7
    made.append(length)
    return bytes(made) + text
