"""All bounds of the server in one value. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
CONNECTION_WINDOW_MIN = 64 * KIB  # the protocol's initial window is one byte less


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A token bucket's parameters: its size, and its refill per second."""

    burst: int
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the resources of one peer, and of all peers together.

    ``header_list_max`` counts names, encoded values and 32 for each field. ``header_list_told`` is the limit announced
    to clients. Above ``header_list_max`` a request is refused (RESOURCE_EXHAUSTED). A block of more than
    ``header_block_max`` encoded bytes ends the connection, because the server would have to buffer it before refusing
    it.

    ``held_per_connection`` and ``held_in_all`` bound the input that no handler has finished with, and the output that
    no peer has read. Above them, the calls of the largest holder that wait for their peer end with RESOURCE_EXHAUSTED:
    see ``bounds``.
    """

    connections: int = 4096
    # Enforced only while the server is full; None is a quarter of ``connections``.
    connections_per_address: int | None = None
    connections_reserved: int = 32  # of ``connections``, for operators and health checks on this machine
    streams: int = 2048  # per connection; a push consumer keeps one receive open, a load generator thousands of sends
    header_list_told: int = 32 * KIB
    header_list_max: int = 64 * KIB
    header_block_max: int = 128 * KIB
    header_block_s: float = 10.0  # time limit for a complete block
    continuations: int = 64  # frames per block; with 16 KiB frames this exceeds header_block_max
    # Memory of open streams with their header lists: per connection, per address, and in total.
    lists_per_connection: int = 16 * MIB
    lists_per_address: int = 64 * MIB
    lists_in_all: int = 256 * MIB
    request_max: int = 8 * MIB  # one message, after decompression too
    held_per_connection: int = 64 * MIB
    held_in_all: int = 256 * MIB
    held_reserve: int = 32 * MIB  # the part of held_in_all for operators and health checks on this host
    stream_window: int = 1 * MIB
    connection_window: int = 16 * MIB
    unsent_high: int = 64 * KIB  # bytes in the transport's write buffer above which writing pauses
    control_unsent_max: int = 256 * KIB  # queued answers to PINGs and similar frames while the peer does not read

    request_s: float = 30.0  # for a complete request, and for a read answer; extended while bytes are transferred
    operator_s: float = 2.0  # within which a connection in the reserve needs a call of an operator or health check
    preface_s: float = 10.0  # from the connection to its first SETTINGS, the TLS handshake included
    ping_after_s: float = 60.0  # of silence
    ping_answer_s: float = 20.0
    idle_s: float | None = 300.0  # without a stream
    age_s: float | None = None
    age_grace_s: float = 30.0

    # A client resets one stream for each call that reaches its deadline, so this is generous.
    resets: Rate = Rate(burst=4096, per_s=1000)
    # Counted between calls' own frames only: clients that estimate bandwidth ping once per round trip under load.
    pings: Rate = Rate(burst=1000, per_s=100)
    settings: Rate = Rate(burst=50, per_s=5)
    # DATA without a byte, PRIORITY, frames of unknown types
    idle_frames: Rate = Rate(burst=1000, per_s=500)
    # WINDOW_UPDATEs, and DATA of a few bytes, in excess of those that calls and answers entail
    small_frames: Rate = Rate(burst=10_000, per_s=1000)
    # Cost of one connection's input per loop iteration, in units of about a microsecond: some 80 calls.
    # A smaller one would split the input of a busy producer, and each part would be committed as its own batch.
    slice_cost: int = 1000

    def __post_init__(self) -> None:
        """Refuse values that the protocol cannot express. Raises ValueError."""
        if not CONNECTION_WINDOW_MIN <= self.connection_window < 2**31:
            raise ValueError(f"connection_window: {CONNECTION_WINDOW_MIN} to {2**31 - 1}")
        if not 0 <= self.held_reserve < self.held_in_all:
            raise ValueError(f"held_reserve: less than held_in_all, {self.held_in_all}")
        if not 0 < self.stream_window < 2**31:
            raise ValueError(f"stream_window: 1 to {2**31 - 1}")
