"""Keep what RocketMQ's own classic client and a broker say to each other, as ``tests/golden/remoting`` has it.

    .venv/bin/python tools/capture_remoting.py

Starts a broker, has ``tests/support/clients/java/Frames.java`` talk to it through a relay, and writes the first frames
of each kind, without the length that they begin with: ``java-<operation>-<number>.bin`` for requests,
``broker-<operation>.bin`` for the first answer to one. The Java client is told to be 127.0.0.1. It takes Java and
Maven, and half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.rocketmq import RocketMQ, artifacts  # noqa: E402 - the path comes first
from broker_adapter.remoting.protocol.codes import Operation  # noqa: E402
from broker_adapter.remoting.protocol.frames import decode_frame  # noqa: E402

FOLDER = ROOT / "tests" / "golden" / "remoting"
TOPIC = "frames"
KEPT = {Operation.SEND: 9, Operation.SEND_BATCH: 1, Operation.HEARTBEAT: 3, Operation.PULL: 2}
ANSWERS = {Operation.SEND, Operation.SEND_BATCH, Operation.LOCK, Operation.MEMBERS, Operation.SEND_BACK}
_MESSAGE_ID = re.compile(rb"UNIQ_KEY(?:\x01|\\u0001)([0-9A-F]+)[0-9A-F]{24}")
_ANONYMOUS = b"20010DB80000000000000000C0000201"  # addresses for documentation, of IPv6 and IPv4
_KNOWN = {int(each) for each in Operation}


class Relay:
    """Passes frames on, and keeps the first ones of each kind. ``rename`` is put in place of bytes in answers."""

    def __init__(self, target: int, rename: tuple[bytes, bytes] = (b"", b"")) -> None:
        self.target, self.rename = target, rename
        self.counts: Counter[int] = Counter()
        self.asked: dict[int, int] = {}  # operations that wait for an answer, by number
        self.port = 0
        self.address = b""  # of this machine, as it stands in the client's message ids

    async def start(self) -> None:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.target)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await asyncio.gather(self._pass(reader, ours, is_client=True), self._pass(theirs, writer, is_client=False))
        writer.close()
        ours.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool) -> None:
        while True:
            content = await reader.readexactly(*struct.unpack(">I", await reader.readexactly(4)))
            self._keep(content, is_client=is_client)
            if not is_client and self.rename[0]:
                content = content.replace(*self.rename)
            writer.write(struct.pack(">I", len(content)) + content)

    def _keep(self, content: bytes, *, is_client: bool) -> None:
        if (found := _MESSAGE_ID.search(content)) is not None:
            self.address = found[1]
        if self.address:
            content = content.replace(self.address, _ANONYMOUS[-len(self.address) :])
        frame = decode_frame(content)
        code = frame.code
        if frame.is_answer:
            code = self.asked.pop(frame.opaque, -1) if not is_client else -1
            if code in ANSWERS:
                ANSWERS.discard(Operation(code))
                (FOLDER / f"broker-{_name(code)}.bin").write_bytes(content)
        elif code in _KNOWN:
            side = "java" if is_client else "broker-asks"
            self.asked[frame.opaque] = code
            self.counts[code] += 1
            if self.counts[code] <= KEPT.get(Operation(code), 1) and code != Operation.ROUTE:
                (FOLDER / f"{side}-{_name(code)}-{self.counts[code]}.bin").write_bytes(content)


def _name(code: int) -> str:
    return Operation(code).name.lower().replace("_", "-")


async def capture(cluster: RocketMQ, lib: Path) -> None:
    """Have the client talk to the broker."""
    (node,) = cluster.nodes
    broker = Relay(node.listen)
    await broker.start()
    here = f"127.0.0.1:{broker.port}".encode()
    names = Relay(int(cluster.names.rpartition(":")[2]), (node.broker.encode(), here))
    await names.start()
    program = str(ROOT / "tests" / "support" / "clients" / "java" / "Frames.java")
    command = ["java", "-cp", f"{lib}/*", program, f"127.0.0.1:{names.port}", TOPIC]
    running = await asyncio.create_subprocess_exec(*command)
    if await running.wait():
        raise subprocess.CalledProcessError(running.returncode or 1, command)


def main() -> None:
    """Capture anew."""
    lib = artifacts()
    for path in (*FOLDER.glob("java-*.bin"), *FOLDER.glob("broker-*.bin")):
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        cluster = RocketMQ(Path(folder), lib, heap_mb=384)
        try:
            cluster.make_topics({TOPIC: "MIXED"})
            cluster.make_group("frames-failing")
            asyncio.run(capture(cluster, lib))
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
