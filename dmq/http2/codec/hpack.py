"""HPACK (RFC 7541) with lazy decoding: header values stay encoded until they are requested.

A *wire value* is the encoded form in a block: a length, its Huffman flag, and that many bytes. To decode all of them
would cost twice as much as the rest of a call. Names are always decoded, because each one has to be checked, and they
are few.

The dynamic table uses the decoded size of its entries only for eviction. It is sufficient not to evict too early.
Indices count from the newest entry, so older entries that remain make no difference to a conforming encoder. So the
sizes are lower bounds, and the table is a superset of the exact one. Its memory is still bounded: a value of n bytes of
Huffman code has at least n * 8 / 30 characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from dmq.http2.codec.huffman import decode as huffman_decode
from dmq.http2.codec.huffman import encode as huffman_encode
from dmq.http2.errors import Code, ConnectionFault, HpackFault

TABLE_BYTES: Final = 4096  # the default; with 0, clients' blocks are six times as long
_ENTRY_BYTES: Final = 32  # overhead of an entry in the table size
_INTEGER_MAX: Final = 2**31
_KEPT_NAME_BYTES: Final = 64
_KEPT_NAMES: Final = 4096
_KEPT_VALUE_BYTES: Final = 256
NAME_BYTES_MAX: Final = 4096  # new names in one block: each byte costs 0.2 us
_CODE_BYTES_MAX: Final = 8192  # of one value; the same cost
_COUNTED_BYTES: Final = 1024  # the number of fields is checked after every chunk of this size

_STATIC_FIELDS = """\
:authority |:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|:status 204|\
:status 206|:status 304|:status 400|:status 404|:status 500|accept-charset |accept-encoding gzip, deflate|\
accept-language |accept-ranges |accept |access-control-allow-origin |age |allow |authorization |cache-control |\
content-disposition |content-encoding |content-language |content-length |content-location |content-range |\
content-type |cookie |date |etag |expect |expires |from |host |if-match |if-modified-since |if-none-match |if-range |\
if-unmodified-since |last-modified |link |location |max-forwards |proxy-authenticate |proxy-authorization |range |\
referer |refresh |retry-after |server |set-cookie |strict-transport-security |transfer-encoding |user-agent |vary |\
via |www-authenticate """


# Name, wire value, and table size of a field, for entries of the tables and fields of a block.
Field = tuple[str, bytes, int]


def _static() -> list[Field]:
    fields = [("", b"", 0)]  # indices start at 1
    for field in _STATIC_FIELDS.split("|"):
        name, _, value = field.partition(" ")
        fields.append((name, bytes((len(value),)) + value.encode(), _ENTRY_BYTES + len(name) + len(value)))
    return fields


STATIC: Final = _static()
_STATIC_SIZE: Final = len(STATIC) - 1
_NEWEST: Final = 0x80 + len(STATIC)  # the byte that encodes the newest entry of the dynamic table

# Cache of names by wire form. Bounded in number and length for any input.
_names: dict[bytes, str] = {}


class Decoder:
    """Decoder of the header blocks of one connection, in the order received, including those of refused streams."""

    __slots__ = ("_entries", "_fields_max", "_list_bytes_max", "_size", "_size_max", "largest", "name_bytes_left")

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._entries: list[Field] = []  # the newest last
        self._size = 0
        self._size_max = TABLE_BYTES
        self.largest = 64  # the largest size of any entry so far
        self.name_bytes_left = NAME_BYTES_MAX  # of new names in the current block
        self._fields_max = max(_COUNTED_BYTES, list_bytes_max // _ENTRY_BYTES)

    def decode(self, block: bytes) -> tuple[tuple[str, ...], tuple[bytes, ...], bool]:
        """Return names, wire values, and True if the list is within its bound.

        Above the bound the names and values are omitted, but the table is updated in any case. Raises HpackFault.
        Raises ConnectionFault for a block above its cost bound: too many fields, or too many bytes of new names.
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
                        raise HpackFault("table size update inside a header block")
                    else:
                        at = self._resize(block, at)
                if at < end and len(fields) > self._fields_max:
                    raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many header fields in one block")
        except IndexError:  # an explicit check would cost as much as the rest of a field
            raise HpackFault("index outside the header tables") from None
        if not fields:
            return (), (), True
        # The upper bound is sufficient for almost every block, and cheaper than a sum.
        if end + len(fields) * self.largest > self._list_bytes_max and not self._is_in_bounds(fields):
            return (), (), False
        names, values, _ = zip(*fields, strict=True)
        return names, values, True

    @property
    def table_bytes(self) -> int:
        """The size of the dynamic table, with the decoder's lower bounds."""
        return self._size

    def _is_in_bounds(self, fields: list[Field]) -> bool:
        return sum(len(name) + len(wire) + _ENTRY_BYTES for name, wire, _ in fields) <= self._list_bytes_max

    def _literal(self, block: bytes, at: int) -> tuple[Field, int]:
        first = block[at]
        if first == 0x80:
            raise HpackFault("index outside the header tables")
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
        if length == 0x7F or at > len(block):  # a long or truncated text
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
            raise HpackFault("index outside the header tables")
        return self._entries[_STATIC_SIZE - index]

    def _name(self, wire: bytes) -> str:
        name = _names.get(wire)
        if name is None:
            self.name_bytes_left -= len(wire)
            if self.name_bytes_left < 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many bytes of new header names")
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
            raise HpackFault("dynamic table above the offered size")
        self._size_max = size
        while self._size > size:
            self._size -= self._entries.pop(0)[2]
        return at


def _integer(block: bytes, at: int, start: int) -> tuple[int, int]:
    """Return the integer whose prefix was full, and its end offset."""
    if at < len(block) and (byte := block[at]) < 0x80:  # most end here
        return start + byte, at + 1
    value = start
    shift = 0
    while True:
        if at >= len(block):
            raise HpackFault("header block ends inside an integer")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise HpackFault("integer of too many bytes")
    if value > _INTEGER_MAX:
        raise HpackFault("a number that is too large")
    return value, at


def _text_end(block: bytes, at: int) -> tuple[int, int]:
    """Return the end offset of the text at ``at``, and its length."""
    if at >= len(block):
        raise HpackFault("header block ends before a string")
    length = block[at] & 0x7F
    at += 1
    if length == 0x7F:
        length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackFault("header block ends inside a string")
    return end, length


def _text(wire: bytes) -> bytes:
    end, length = _text_end(wire, 0)
    raw = wire[end - length : end]
    if length > _CODE_BYTES_MAX and wire[0] & 0x80:
        raise HpackFault("Huffman value too long to decode")
    return huffman_decode(raw) if wire[0] & 0x80 else raw


def _new_name(wire: bytes) -> str:
    name = _text(wire).decode("latin-1")
    if len(wire) <= _KEPT_NAME_BYTES:
        if len(_names) >= _KEPT_NAMES:
            _names.clear()
        _names[wire] = name
    return name


def list_size(names: Iterable[str], values: Iterable[bytes]) -> int:
    """Return the size of a header list: names, encoded values, and 32 for each field."""
    return sum(len(name) + len(wire) + _ENTRY_BYTES for name, wire in zip(names, values, strict=True))


def value_of(wire: bytes) -> str:
    """Decode a wire value. Raises HpackFault for invalid Huffman code, possibly long after its block was accepted.

    Invalid UTF-8 and the characters that HTTP forbids in a value (NUL, CR, LF) become U+FFFD.
    """
    return _kept_value(wire) if len(wire) <= _KEPT_VALUE_BYTES else value_of_once(wire)


def wires_of(text: str) -> frozenset[bytes]:
    """Return a short text as wire values, plain and in Huffman code, for comparisons without decoding."""
    plain = text.encode()
    code = huffman_encode(plain)
    return frozenset({bytes((len(plain),)) + plain, bytes((0x80 | len(code),)) + code})


def value_of_once(wire: bytes) -> str:
    """Decode as ``value_of`` does, without the cache, for a value that is unlikely to repeat."""
    text = _text(wire).decode("utf-8", "replace")
    if "\n" in text or "\r" in text or "\0" in text:
        text = text.translate({0: "\ufffd", 10: "\ufffd", 13: "\ufffd"})
    return text


# A client's id, language and version repeat in every call. Bounded: 4096 values of 256 bytes.
_kept_value = lru_cache(maxsize=4096)(value_of_once)


def literal(name: str, value: bytes) -> bytes:
    """Encode a field without a table, for constant blocks: the peer's table does not change."""
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
