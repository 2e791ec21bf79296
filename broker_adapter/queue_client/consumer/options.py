"""Options of a consumer; every default is that of RocketMQ 5.5's push consumer unless a comment states otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from broker_adapter.contracts.classic import Start
from broker_adapter.queue_client.balance import CONSUME_MS_MAX, Averagely, Strategy, WindowBounds

_ATTEMPTS_MAX = 16
_EVER = 2**31 - 1
_BOUNDS = WindowBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Options of a consumer. ``ValueError`` for an invalid combination."""

    in_order: bool = False  # one batch of a queue at a time, under a lock: ConsumeMessageOrderlyService
    is_broadcast: bool = False  # every client receives every message; failures are logged without a retry
    offsets_path: Path | None = None  # for broadcasting: the file with the offsets of this client
    start: Start = Start.LAST_OFFSET
    start_at_ms: int = 0  # with Start.TIMESTAMP: epoch milliseconds, by the brokers' clocks
    strategy: Strategy = field(default_factory=Averagely)
    batch_max: int = 1  # messages of one batch (consumeMessageBatchMaxSize)
    pull_max: int = 32  # messages of one pull
    handlers_max: int = 20  # concurrent batches (consumeThreadMax)
    retries_max: int | None = None  # None: 16; unlimited in order
    bounds: WindowBounds = _BOUNDS
    consume_ms_max: int = CONSUME_MS_MAX
    long_poll_ms: int = 15_000
    rebalance_ms: int = 20_000
    flush_ms: int = 5_000
    pause_ms: int = 1_000  # after a pull that failed
    send_back_again_ms: int = 5_000  # retry delay after no broker accepted a failed message
    suspend_ms: int = 1_000  # in order, between two tries of one batch
    close_ms: int = 10_000  # wait of ``close`` for handlers; ours: RocketMQ does not wait

    def __post_init__(self) -> None:
        if self.is_broadcast and self.offsets_path is None:
            raise ValueError("broadcasting requires offsets_path, its file of offsets")
        if self.start is Start.TIMESTAMP and self.start_at_ms <= 0:
            raise ValueError("Start.TIMESTAMP requires start_at_ms, in epoch milliseconds")
        for name in ("batch_max", "pull_max", "handlers_max"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ValueError(f"{name} must be 1 to 1024; got {getattr(self, name)}")

    @property
    def attempts(self) -> int:
        """Number of failures after which a message becomes a dead letter."""
        if self.retries_max is not None:
            return self.retries_max
        return _EVER if self.in_order else _ATTEMPTS_MAX
