"""Our wire definitions against the official Python client's: same bytes, side by side in one process.

The official client opens a log file under HOME and registers its files in protobuf's default pool when it is imported,
so it only ever runs in a subprocess with a HOME of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from broker_adapter.wire import rocketmq_v2 as pb
from broker_adapter.wire.pool import POOL

pytestmark = pytest.mark.contract
ROOT = Path(__file__).resolve().parents[3]
WIRE = ROOT / "broker_adapter" / "wire"

# Defined on one side only, and why. The comparison fails when an entry is no longer true.
DIFFERENCES = {
    "Code.INVALID_CLIENT_PROPERTIES": "in the protocol's current table of codes; client 5.1.2 does not know it yet",
}

# What clients can call. Written out, so that a method lost from the .proto file is noticed: client and server side.
STREAMING = {
    "QueryRoute": (False, False),
    "Heartbeat": (False, False),
    "SendMessage": (False, False),
    "QueryAssignment": (False, False),
    "ReceiveMessage": (False, True),
    "AckMessage": (False, False),
    "ForwardMessageToDeadLetterQueue": (False, False),
    "PullMessage": (False, True),
    "UpdateOffset": (False, False),
    "GetOffset": (False, False),
    "QueryOffset": (False, False),
    "EndTransaction": (False, False),
    "Telemetry": (True, True),
    "NotifyClientTermination": (False, False),
    "ChangeInvisibleDuration": (False, False),
    "RecallMessage": (False, False),
    "SyncLiteSubscription": (False, False),
}

needs_client = pytest.mark.skipif(
    importlib.util.find_spec("rocketmq") is None, reason="the official client (rocketmq-python-client) is not installed"
)
needs_tools = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="the compiler (grpcio-tools) is not installed"
)
needs_reflection = pytest.mark.skipif(
    importlib.util.find_spec("grpc_reflection") is None, reason="grpcio-reflection is not installed"
)

DUMP = """
import sys
import rocketmq
from google.protobuf import descriptor_pb2, descriptor_pool
found = descriptor_pb2.FileDescriptorSet()
for symbol in ("Message", "MessagingService"):
    descriptor_pool.Default().FindFileContainingSymbol("apache.rocketmq.v2." + symbol).CopyToProto(found.file.add())
open(sys.argv[1], "wb").write(found.SerializeToString())
"""

IN_ONE_PROCESS = """
{first}
{second}
from google.protobuf import descriptor_pool
from rocketmq.grpc_protocol import definition_pb2 as theirs
from broker_adapter.wire import rocketmq_v2 as ours
assert ours.Message is not theirs.Message
assert descriptor_pool.Default().FindMessageTypeByName("apache.rocketmq.v2.Message") is theirs.Message.DESCRIPTOR
data = theirs.Resource(name="topic").SerializeToString()
assert ours.Resource.FromString(data).name == "topic"
"""

ECHO = """
import sys
from rocketmq.grpc_protocol import service_pb2
theirs = service_pb2.SendMessageRequest.FromString(open(sys.argv[1], "rb").read())
open(sys.argv[2], "w", encoding="utf-8").write(str(theirs))
open(sys.argv[3], "wb").write(theirs.SerializeToString(deterministic=True))
"""


def run_with_client(script: str, home: Path, *arguments: Path) -> None:
    """Run a script that may import the official client; an assertion in it fails the test with its traceback."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "HOME": str(home), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def facts(files: list[descriptor_pb2.FileDescriptorProto]) -> dict[str, object]:
    """Everything that decides about bytes and paths on the wire, by dotted name."""
    table: dict[str, object] = {}
    for file in files:
        table[f"package and syntax {file.package}"] = file.syntax
        for message in file.message_type:
            table.update(message_facts(message, message.name))
        for enum in file.enum_type:
            table.update(enum_facts(enum, enum.name))
        for service in file.service:
            for method in service.method:
                streaming = (method.client_streaming, method.server_streaming)
                table[f"{service.name}/{method.name}"] = (method.input_type, method.output_type, *streaming)
    return table


def message_facts(message: descriptor_pb2.DescriptorProto, name: str) -> Iterator[tuple[str, object]]:
    """One line per field: number, type, label, message or enum it refers to, oneof, presence."""
    yield f"message {name}", message.options.map_entry
    for field in message.field:
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        kind = (descriptor_pb2.FieldDescriptorProto.Type.Name(field.type), field.type_name)
        label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label)
        options = field.options.SerializeToString()
        yield f"{name}.{field.name}", (field.number, *kind, label, oneof, field.proto3_optional, options)
    for nested in message.nested_type:
        yield from message_facts(nested, f"{name}.{nested.name}")
    for enum in message.enum_type:
        yield from enum_facts(enum, f"{name}.{enum.name}")


def enum_facts(enum: descriptor_pb2.EnumDescriptorProto, name: str) -> Iterator[tuple[str, object]]:
    """One line per value."""
    for value in enum.value:
        yield f"{name}.{value.name}", value.number


def our_file() -> descriptor_pb2.FileDescriptorProto:
    """The file as the running process has it, not as the .proto file says."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return file


def full_request() -> pb.SendMessageRequest:
    """A request with every field of a message set, to a value that is not its default."""
    moment = pb.Timestamp(seconds=1_700_000_000, nanos=123_000_000)
    properties = pb.SystemProperties(
        tag="tag",
        keys=["key-1", "key-2"],
        message_id="01AABBCCDDEEFF0102030405060708090A",
        body_digest=pb.Digest(type=pb.DigestType.MD5, checksum="9A0364B9E99BB480DD25E1F0284C8555"),
        body_encoding=pb.Encoding.GZIP,
        message_type=pb.MessageType.PRIORITY,
        born_timestamp=moment,
        born_host="producer",
        store_timestamp=moment,
        store_host="broker",
        delivery_timestamp=moment,
        receipt_handle="handle",
        queue_id=7,
        queue_offset=2**40,
        invisible_duration=pb.Duration(seconds=30),
        delivery_attempt=3,
        message_group="group",
        trace_context="trace",
        orphaned_transaction_recovery_duration=pb.Duration(seconds=60),
        dead_letter_queue=pb.DeadLetterQueue(topic="origin", message_id="origin id"),
        lite_topic="lite",
        priority=9,
    )
    message = pb.Message(
        topic=pb.Resource(resource_namespace="namespace", name="topic"),
        user_properties={"one": "1", "zwei": "zw\u00f6lf"},
        system_properties=properties,
        body=bytes(range(256)),
    )
    return pb.SendMessageRequest(messages=[message, pb.Message()])


@needs_client
def test_every_definition_equals_the_official_clients(tmp_path: Path) -> None:
    """Every message, field, enum value and method has the official name, number, type, label and oneof, both ways."""
    run_with_client(DUMP, tmp_path, tmp_path / "official")
    official = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "official").read_bytes())
    theirs, ours = facts(list(official.file)), facts([our_file()])
    assert {
        name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]
    } == {}
    assert ours.keys() ^ theirs.keys() == DIFFERENCES.keys()


def test_definitions_newer_than_the_official_client() -> None:
    """What the comparison cannot vouch for has the number of the protocol's table."""
    assert pb.Code.INVALID_CLIENT_PROPERTIES == 40021


@needs_client
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "official first"])
def test_lives_in_one_process_with_the_official_client(tmp_path: Path, ours_first: bool) -> None:
    """Both definitions load in either order, stay separate classes, and read each other's bytes."""
    imports = ["import broker_adapter.wire.rocketmq_v2", "import rocketmq"]
    first, second = imports if ours_first else reversed(imports)
    run_with_client(IN_ONE_PROCESS.format(first=first, second=second), tmp_path)


def test_default_pool_stays_untouched(tmp_path: Path) -> None:
    """Loading our definitions leaves nothing of theirs in protobuf's default pool."""
    script = (
        "import broker_adapter.wire.rocketmq_v2\n"
        "from google.protobuf import descriptor_pool\n"
        "try:\n"
        "    descriptor_pool.Default().FindMessageTypeByName('apache.rocketmq.v2.Message')\n"
        "except KeyError:\n"
        "    raise SystemExit(0)\n"
        "raise SystemExit('found in the default pool')\n"
    )
    run_with_client(script, tmp_path)
    assert POOL is not descriptor_pool.Default()
    assert pb.DESCRIPTOR.pool is POOL


@needs_client
def test_send_message_round_trip_through_official_classes(tmp_path: Path) -> None:
    """Official classes read every field of a full request and give back the same bytes; ours read those as equal."""
    request = full_request()
    filled = request.messages[0].system_properties
    assert {field.name for field, _ in filled.ListFields()} == {field.name for field in filled.DESCRIPTOR.fields}
    (tmp_path / "ours").write_bytes(request.SerializeToString(deterministic=True))
    run_with_client(ECHO, tmp_path, tmp_path / "ours", tmp_path / "text", tmp_path / "theirs")
    # The text names every field and enum value, so a field that only survived as an unknown number would show.
    assert (tmp_path / "text").read_text(encoding="utf-8") == str(request)
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours").read_bytes()
    assert pb.SendMessageRequest.FromString((tmp_path / "theirs").read_bytes()) == request


@needs_tools
def test_generated_files_are_fresh(tmp_path: Path) -> None:
    """The committed descriptor set and stub are what tools/generate_wire.py makes of the .proto file, byte for byte."""
    tool = ROOT / "tools" / "generate_wire.py"
    subprocess.run([sys.executable, str(tool), "--out", str(tmp_path)], check=True, timeout=60)
    for name in ("rocketmq_v2.desc", "rocketmq_v2.pyi"):
        same = (tmp_path / name).read_bytes() == (WIRE / name).read_bytes()
        assert same, f"{name} is stale: run tools/generate_wire.py (here with grpcio-tools {version('grpcio-tools')})"


def test_the_stub_promises_only_existing_names() -> None:
    """Every public name and class member of the typed stub exists at run time, and nothing public is untyped."""
    stub = ast.parse((WIRE / "rocketmq_v2.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    variables = {
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    promised = classes.keys() | variables | {"Timestamp", "Duration"}
    assert promised - vars(pb).keys() == set()
    loaded = {name for name in vars(pb) if not name.startswith("_")} - {"annotations", "load"}
    assert loaded - promised == set()
    for name, node in classes.items():
        wrapper_or_class = getattr(pb, name)
        # Fields are seen on an instance only; enums have no instances.
        owner = wrapper_or_class() if isinstance(wrapper_or_class, type) else wrapper_or_class
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                assert hasattr(owner, line.target.id), f"{name}.{line.target.id}"


def test_methods_are_complete() -> None:
    """The table has every RPC a client can call, with path, streaming and the classes of its request and response."""
    assert pb.SERVICE == "apache.rocketmq.v2.MessagingService"
    assert {name: (m.client_streaming, m.server_streaming) for name, m in pb.METHODS.items()} == STREAMING
    for name, method in pb.METHODS.items():
        assert method.name == name
        assert method.path == f"/apache.rocketmq.v2.MessagingService/{name}"
        both = ("TelemetryCommand",) * 2 if name == "Telemetry" else (f"{name}Request", f"{name}Response")
        assert (method.request_class, method.response_class) == (getattr(pb, both[0]), getattr(pb, both[1]))
        assert "status" in method.response_class.DESCRIPTOR.fields_by_name


def test_enums_and_well_known_types_behave_like_generated_code() -> None:
    """Enum values are ints with names, numbers newer than ours survive, times convert like google.protobuf's."""
    assert (pb.Code.OK, pb.OK, pb.Code.Name(20000), pb.Code.Value("OK")) == (20000, 20000, "OK", 20000)
    assert pb.OffsetOption.Policy.Name(pb.OffsetOption.MAX) == "MAX"
    assert pb.Status.FromString(b"\x08\x87\x9a\x03").code == 52487
    moment = pb.Timestamp()
    moment.FromMilliseconds(1_700_000_000_123)
    assert pb.ReceiveMessageResponse(delivery_timestamp=moment).delivery_timestamp.ToMilliseconds() == 1_700_000_000_123
    with pytest.raises(ValueError, match="must be in range"):
        pb.Timestamp(seconds=1_700_000_000_123).ToMilliseconds()


@needs_reflection
def test_reflection_serves_the_private_pool() -> None:
    """The standard reflection service finds our service, and the files it needs, in the private pool."""
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    servicer = reflection.ReflectionServicer([pb.SERVICE], pool=POOL)
    ask = reflection_pb2.ServerReflectionRequest
    requests = [ask(list_services=""), ask(file_containing_symbol=pb.SERVICE)]
    requests += [ask(file_by_filename=f"google/protobuf/{name}.proto") for name in ("timestamp", "duration")]
    no_context: Any = None
    listed, *answers = servicer.ServerReflectionInfo(iter(requests), no_context)
    assert [service.name for service in listed.list_services_response.service] == [pb.SERVICE]
    assert answers[0].file_descriptor_response.file_descriptor_proto[0] == our_file().SerializeToString()
    assert all(answer.file_descriptor_response.file_descriptor_proto for answer in answers)
