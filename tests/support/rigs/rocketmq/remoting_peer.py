"""A name server and a broker in one, of the classic protocol: for what a real one cannot be made to do at will."""

from __future__ import annotations

import json
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from broker_adapter.remoting.protocol.codes import Operation
from broker_adapter.remoting.protocol.frames import RemotingFrame, decode_frame, encode_frame
from broker_adapter.remoting.protocol.stored import decode_messages

BROKER = "broker-a"


@dataclass(slots=True)
class HeldQueue:
    """A queue: its messages as bytes, from offset ``begin`` on."""

    messages: list[bytes] = field(default_factory=list)
    begin: int = 0

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self.begin + len(self.messages)

    def offset_at(self, stored_at_ms: int) -> int:
        """The first offset that was stored at or after a time."""
        times = [each.stored_at_ms for message in self.messages for each in decode_messages(message)]
        return self.begin + sum(each < stored_at_ms for each in times)


class Peer:
    """Its topics, and ``before``, which is called with each request and may answer in its place.

    A request that ``stops_at`` is true of is never answered.
    """

    def __init__(self) -> None:
        self.topics: dict[str, list[HeldQueue]] = {}
        self.asked: list[RemotingFrame] = []
        self.before: Callable[[RemotingFrame], RemotingFrame | None] = lambda _: None
        self.stops_at: Callable[[RemotingFrame], bool] = lambda _: False
        self.says: list[RemotingFrame] = []  # by itself, before the next answer
        self.pull_max = 32
        self.address = ""

    def answer(self, request: RemotingFrame) -> RemotingFrame:
        """As a broker of RocketMQ does, for what the client asks."""
        self.asked.append(request)
        if (instead := self.before(request)) is not None:
            return instead
        fields = request.fields
        queues = self.topics.get(fields["topic"])
        if queues is None:
            return RemotingFrame(code=17, remark="No topic route info")
        if request.code == Operation.ROUTE:
            data = {"brokerName": BROKER, "readQueueNums": len(queues), "writeQueueNums": len(queues), "perm": 6}
            brokers = [{"brokerName": BROKER, "brokerAddrs": {"0": self.address}}]
            return RemotingFrame(code=0, body=json.dumps({"queueDatas": [data], "brokerDatas": brokers}).encode())
        queue = queues[int(fields["queueId"])]
        offsets = {
            Operation.BEGIN_OFFSET: lambda: queue.begin,
            Operation.END_OFFSET: lambda: queue.end,
            Operation.OFFSET_AT: lambda: queue.offset_at(int(fields["timestamp"])),
        }
        if request.code != Operation.PULL:
            return RemotingFrame(code=0, fields={"offset": str(offsets[Operation(request.code)]())})
        at = int(fields["queueOffset"])
        if not queue.begin <= at <= queue.end:
            return RemotingFrame(
                code=21, fields={"nextBeginOffset": str(queue.begin if at < queue.begin else queue.end)}
            )
        found = queue.messages[at - queue.begin :][: min(self.pull_max, int(fields["maxMsgNums"]))]
        return RemotingFrame(
            code=0 if found else 19, fields={"nextBeginOffset": str(at + len(found))}, body=b"".join(found)
        )


@contextmanager
def remoting_peer() -> Iterator[Peer]:
    """Give one that is served on loopback until the context ends."""
    peer = Peer()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.read(4):
                request = decode_frame(self.rfile.read(struct.unpack(">I", head)[0]))
                if peer.stops_at(request):
                    continue
                if request.is_one_way or request.is_answer:
                    peer.asked.append(request)
                    continue
                while peer.says:
                    self.wfile.write(encode_frame(peer.says.pop(0)))
                answer = peer.answer(request)
                whole = RemotingFrame(
                    code=answer.code,
                    opaque=request.opaque,
                    is_answer=True,
                    remark=answer.remark,
                    fields=answer.fields,
                    body=answer.body,
                    version=answer.version,
                )
                self.wfile.write(encode_frame(whole))

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        peer.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield peer
        finally:
            server.shutdown()
            thread.join()
