"""Every bound of the server in one value. Sizes are bytes, times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
CONNECTION_WINDOW_MIN = 64 * KIB  # every connection begins with a byte less


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and so many per second in the long run."""

    burst: int
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one peer, and all of them together, may take.

    ``header_list_max``: names, values as they came and 32 for each field. Clients are told ``header_list_told`` and
    refused above ``header_list_max`` (RESOURCE_EXHAUSTED); a block of more than ``header_block_max`` encoded bytes ends
    the connection, since refusing it would mean to keep it first.

    ``held_per_connection`` and ``held_in_all`` bound what has come in and no handler has finished with, and what goes
    out and no peer has taken. When that is too much, what waits for the peer that holds most ends with
    RESOURCE_EXHAUSTED: see ``bounds``.
    """

    connections: int = 4096
    # While others are refused no address keeps more than this; None is a quarter of ``connections``.
    connections_per_address: int | None = None
    connections_reserved: int = 32  # of ``connections``, for operators and health checks on this machine
    streams: int = 2048  # per connection; a push consumer keeps one receive open, a load generator thousands of sends
    header_list_told: int = 32 * KIB
    header_list_max: int = 64 * KIB
    header_block_max: int = 128 * KIB
    header_block_s: float = 10.0  # for a block to become whole
    continuations: int = 64  # frames of one block; at 16 KiB a frame this is more than a block may have
    # Open streams with their header lists: of one connection, of one address, and of all together.
    lists_per_connection: int = 16 * MIB
    lists_per_address: int = 64 * MIB
    lists_in_all: int = 256 * MIB
    request_max: int = 8 * MIB  # one message, after decompression too
    held_per_connection: int = 64 * MIB
    held_in_all: int = 256 * MIB
    held_reserve: int = 32 * MIB  # the part of it that nobody but operators and health checks on this host may fill
    stream_window: int = 1 * MIB
    connection_window: int = 16 * MIB
    unsent_high: int = 64 * KIB  # the socket's buffer in this process, above which writing pauses
    control_unsent_max: int = 256 * KIB  # answers to the peer's PINGs and the like while it does not read

    request_s: float = 30.0  # for a request to become whole, and for an answer to be taken; more if bytes keep moving
    operator_s: float = 2.0  # until a connection of the reserve has been called on by one of them
    preface_s: float = 10.0  # from the connection to its first SETTINGS, the TLS handshake included
    ping_after_s: float = 60.0  # of silence
    ping_answer_s: float = 20.0
    idle_s: float | None = 300.0  # without a stream
    age_s: float | None = None
    age_grace_s: float = 30.0

    # A client whose calls all hit their deadline resets one stream per call, so this is generous.
    resets: Rate = Rate(burst=4096, per_s=1000)
    # Counted between calls' own frames only: clients that estimate bandwidth ping once per round trip under load.
    pings: Rate = Rate(burst=1000, per_s=100)
    settings: Rate = Rate(burst=50, per_s=5)
    # DATA without a byte, PRIORITY, frames of unknown types
    idle_frames: Rate = Rate(burst=1000, per_s=500)
    # WINDOW_UPDATEs, and DATA of a few bytes, beyond what calls and answers bring with them
    small_frames: Rate = Rate(burst=10_000, per_s=1000)
    # What of one connection's input is read in one turn of the loop, in units of about a microsecond: some 80 calls.
    # A smaller one would cut what a busy producer sends at once, and each piece is a batch of its own to commit.
    slice_cost: int = 1000

    def __post_init__(self) -> None:
        """Refuse what the protocol cannot say. Raises ValueError."""
        if not CONNECTION_WINDOW_MIN <= self.connection_window < 2**31:
            raise ValueError(f"connection_window: {CONNECTION_WINDOW_MIN} to {2**31 - 1}")
        if not 0 <= self.held_reserve < self.held_in_all:
            raise ValueError(f"held_reserve: less than held_in_all, {self.held_in_all}")
        if not 0 < self.stream_window < 2**31:
            raise ValueError(f"stream_window: 1 to {2**31 - 1}")
