"""The Huffman code of HPACK (RFC 7541, appendix B).

The code is canonical: codes of one length are consecutive, in the order of their symbols. So the lengths define the
table.
"""

from __future__ import annotations

from dmq.http2.errors import HpackFault

# One letter per byte value: a = 5 bits, b = 6, ... z = 30. The end-of-string symbol has 30.
_LENGTHS = (
    "isxxxxxxxtzxxzxxxxxxxxzxxxxxxxxxbffhibdgffdgdbbbaaabbbbbbbcdkbhfibccccccccccccccccccccccdcdioijb"
    "kabababbbaccbbbabcbaabccccckgjixprpprrrsrssssststtrstssssqrsrsstrqprrssqsrrtqrssqqrqsrssprrrsrrs"
    "vvporsruvvvwwvtuoqvwwvwtqqvvxwwwptpqrqqsrruuttvsvwvvwwwwwxwwwwwv"
    "z"
)
_EOS = 256
_MORE = -1  # a nibble that ends inside a code
_BAD = -2  # a nibble that completes the end-of-string symbol, which must not be sent


def _assign() -> list[tuple[int, int]]:
    """Return ``(code, bits)`` of each symbol."""
    codes = [(0, 0)] * len(_LENGTHS)
    code = bits_before = 0
    for bits, symbol in sorted((ord(letter) - ord("a") + 5, symbol) for symbol, letter in enumerate(_LENGTHS)):
        code <<= bits - bits_before
        codes[symbol] = (code, bits)
        code += 1
        bits_before = bits
    return codes


def _steps(codes: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], frozenset[int]]:
    """Return the transitions of an automaton that consumes four bits at a time, and its accepting states.

    The transition of a state and a nibble is ``steps[16 * state + nibble] = (next state, symbol or _MORE or _BAD)``. No
    code is shorter than five bits, so a nibble completes at most one symbol.
    """
    prefixes = {(0, 0): 0}  # (bits, how many) of each inner node of the tree, and its state
    symbols = {}
    for symbol, (code, bits) in enumerate(codes):
        symbols[code, bits] = symbol
        for shorter in range(1, bits):
            prefixes.setdefault((code >> (bits - shorter), shorter), len(prefixes))
    steps = []
    for code, bits in list(prefixes):
        for nibble in range(16):
            at, depth, found = code, bits, _MORE
            for shift in (3, 2, 1, 0):
                at, depth = at << 1 | nibble >> shift & 1, depth + 1
                if (symbol := symbols.get((at, depth), _MORE)) != _MORE:
                    found = _BAD if symbol == _EOS or found == _BAD else symbol
                    at = depth = 0
            steps.append((prefixes[at, depth], found))
    # padding is up to seven bits, all of them ones
    ends = frozenset(prefixes[(1 << depth) - 1, depth] for depth in range(8))
    return steps, ends


_CODES = _assign()
_STEPS, _ENDS = _steps(_CODES)


# The same for whole bytes: the next state, and the symbols that the byte completes. Filled on demand. There are 256
# for each of 256 states: 11 MB, measured, if hostile texts use all of them.
_leaps: dict[int, tuple[int, bytes]] = {}


def decode(raw: bytes) -> bytes:
    """Return the decoded text; raise HpackFault for invalid padding and for the end-of-string symbol."""
    state = 0
    pieces: list[bytes] = []
    for byte in raw:
        state, piece = _leaps.get(state << 8 | byte) or _leap(state, byte)
        pieces.append(piece)
    if state not in _ENDS:
        raise HpackFault("invalid padding of a Huffman string")
    return b"".join(pieces)


def _leap(state: int, byte: int) -> tuple[int, bytes]:
    key, piece = state << 8 | byte, b""
    for nibble in (byte >> 4, byte & 15):
        state, symbol = _STEPS[16 * state + nibble]
        if symbol == _BAD:
            raise HpackFault("end-of-string symbol in a Huffman string")
        if symbol != _MORE:
            piece += bytes((symbol,))
    leap = _leaps[key] = state, piece
    return leap


def encode(text: bytes) -> bytes:
    """Return the Huffman code of a text, padded with ones."""
    value = size = 0
    for byte in text:
        code, bits = _CODES[byte]
        value = value << bits | code
        size += bits
    padding = -size % 8
    return (value << padding | (1 << padding) - 1).to_bytes((size + padding) // 8)
