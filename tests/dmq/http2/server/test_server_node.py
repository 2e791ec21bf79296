"""grpc-js, the client library of the official Node client, in front of our server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvloop

from broker_adapter.runtime.clock import SystemClock
from dmq.http2 import Http2Server
from dmq.http2.testing.service import Service

pytestmark = pytest.mark.integration
NODE = Path(__file__).parents[3] / "clients" / "node"

PROGRAM = """
import grpc from '@grpc/grpc-js';
const client = new grpc.Client(process.argv[1], grpc.credentials.createInsecure(), {
  'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1,
});
const same = (value) => value;
const unary = (name, message, {metadata = new grpc.Metadata(), options = {}} = {}) => new Promise((resolve) => {
  const call = client.makeUnaryRequest('/t.T/' + name, same, same, message, metadata, options, (error, answer) => {
    resolve(error ? {code: error.code, details: error.details} : answer);
  });
  if (options.cancel) setTimeout(() => call.cancel(), 100);
});
const found = {};
found.sizes = [];
for (const size of [0, 1, 16379, 65531, 1 << 20, 8 << 20]) {
  const message = Buffer.alloc(size, 7);
  found.sizes.push(message.equals(await unary('Echo', message)) ? size : -1);
}
const metadata = new grpc.Metadata();
metadata.add('x-mq-client-id', 'node@1');
metadata.add('many', 'one');
metadata.add('many', 'two');
metadata.add('raw-bin', Buffer.from([0, 255]));
found.told = (await unary('Tell', Buffer.alloc(0), {metadata})).toString();
found.refused = await unary('Refuse', Buffer.from('5'));
found.failed = await unary('Fail', Buffer.alloc(0));
found.unknown = await unary('Nothing', Buffer.alloc(0));
found.late = (await unary('Wait', Buffer.alloc(0), {options: {deadline: Date.now() + 200}})).code;
found.cancelled = (await unary('Wait', Buffer.alloc(0), {options: {cancel: true}})).code;
found.many = (await Promise.all([...Array(500).keys()].map(
  (at) => unary('Echo', Buffer.from('m' + at)).then((answer) => answer.toString() === 'm' + at)))).every(same);
found.counted = await new Promise((resolve) => {
  let count = 0;
  const call = client.makeServerStreamRequest('/t.T/Count', same, same, Buffer.from('5000'));
  call.on('data', () => { count += 1; });
  call.on('status', (status) => resolve([count, status.code]));
});
found.both = await new Promise((resolve) => {
  const answers = [];
  const call = client.makeBidiStreamRequest('/t.T/Twice', same, same);
  call.on('data', (answer) => {
    answers.push(answer.toString());
    if (answers.length < 3) call.write(Buffer.from('x' + answers.length)); else call.end();
  });
  call.on('status', (status) => resolve([answers, status.code]));
  call.write(Buffer.from('x0'));
});
client.close();
console.log(JSON.stringify(found));
"""


def require_grpc_js() -> None:
    """Skip, by name, where the library cannot run; in CI that is a failure."""
    missing = "" if (NODE / "node_modules" / "@grpc" / "grpc-js").is_dir() else "grpc-js is not installed"
    if shutil.which("node") is None:
        missing = "node is not installed"
    if missing:
        assert not os.environ.get("CI"), f"required in CI: {missing}"
        pytest.skip(missing)


async def run_program() -> tuple[dict[str, Any], Service]:
    service = Service()
    clock_s = SystemClock().monotonic_s
    server = Http2Server(service.methods, host="127.0.0.1", port=0, monotonic_s=clock_s)
    address = f"127.0.0.1:{await server.start()}"
    process = await asyncio.create_subprocess_exec(
        *("node", "--input-type=module", "-e", PROGRAM, address), cwd=NODE, stdout=subprocess.PIPE
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    await server.stop(5)
    assert server.figures().held_bytes == 0
    found: dict[str, Any] = json.loads(told)
    return found, service


def test_grpc_js() -> None:
    """Sizes, metadata, statuses, deadline, cancel, 500 at once, streams one way and both ways."""
    require_grpc_js()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, service = runner.run(run_program())
    assert found["sizes"] == [0, 1, 16379, 65531, 1 << 20, 8 << 20]
    for part in ("('many', 'one')", "('many', 'two')", "('raw-bin', b'\\x00\\xff')", "('x-mq-client-id', 'node@1')"):
        assert part in found["told"]
    assert found["refused"] == {"code": 5, "details": "100 % nö\n"}
    assert found["failed"]["code"] == 13
    assert found["unknown"]["code"] == 12
    assert (found["late"], found["cancelled"]) == (4, 1)
    assert service.ended.count == 2
    assert found["many"] is True
    assert found["counted"] == [5000, 0]
    assert found["both"] == [["x0x0", "x1x1", "x2x2"], 0]
