"""Private descriptor pool for all our protocol definitions.

An official client registers its own copy of ``apache.rocketmq.v2`` in protobuf's default pool. Two different files with
the same symbols in one pool are an error at the second registration. This module never uses the default pool, so both
work in one process, in any order of imports.

The cost: messages of this pool accept only messages of this pool. ``Timestamp`` and ``Duration`` are therefore loaded
here as well; those of ``google.protobuf.timestamp_pb2`` are other classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from pkgutil import get_data
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

# A reflection service also needs it: ReflectionServicer(names, pool=POOL).
POOL = DescriptorPool()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """RPC of a service: the fields for a generic handler or a channel's multi-callable.

    ``path`` is the HTTP/2 path, with its leading slash.
    """

    name: str
    path: str
    request_class: type[Message]
    response_class: type[Message]
    client_streaming: bool
    server_streaming: bool

    @property
    def snake_name(self) -> str:
        """Name of a Python method for the RPC: ``get_status`` for ``GetStatus``."""
        return "".join(f"_{each.lower()}" if each.isupper() else each for each in self.name).removeprefix("_")


def load(descriptor_file: str, package: str = "broker_adapter.wire") -> dict[str, object]:
    """Load a FileDescriptorSet of ``package`` into the pool and return the namespace of generated code for it.

    ``name.desc`` represents ``name.proto``: the namespace has that file's messages, enum wrappers and enum values, its
    ``DESCRIPTOR``, its extensions, and the well-known types that it imports (``Timestamp``). If the file declares a
    service, the namespace has its full name as ``SERVICE`` and its table as ``METHODS``. Loading a set twice, or two
    sets with a common import, is allowed.

    Raises FileNotFoundError for a missing set; KeyError for a set without that file; TypeError for a set that
    contradicts the contents of the pool; ValueError for a file with more than one service.
    """
    # importlib.resources would cost 9 ms of imports at the start of every command.
    data = get_data(package, descriptor_file)
    if data is None:
        raise FileNotFoundError(f"{package} has no readable {descriptor_file}")
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(data)
    # protoc writes imports before their dependents, the order that the pool requires.
    for file in descriptors.file:
        POOL.AddSerializedFile(file.SerializeToString())
    return _namespace(POOL.FindFileByName(PurePath(descriptor_file).with_suffix(".proto").name))


def methods(service: ServiceDescriptor) -> Mapping[str, Method]:
    """Return the RPCs of a service by name, in the order of their declaration."""
    table = {
        method.name: Method(
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            request_class=GetMessageClass(method.input_type),
            response_class=GetMessageClass(method.output_type),
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
        )
        for method in service.methods
    }
    return MappingProxyType(table)


def option(method: Method, extension: FieldDescriptor) -> Any:  # noqa: ANN401 - of the type that it declares
    """Return the value of an extension of ``MethodOptions`` for an RPC."""
    # Options are classes of the default pool, which does not know our extensions.
    options_class: Any = GetMessageClass(POOL.FindMessageTypeByName("google.protobuf.MethodOptions"))
    found = POOL.FindMethodByName(method.path[1:].replace("/", ".")).GetOptions()
    return options_class.FromString(found.SerializeToString()).Extensions[extension]


def _namespace(file: FileDescriptor) -> dict[str, object]:
    names: dict[str, object] = {"DESCRIPTOR": file, **file.extensions_by_name}
    for dependency in file.dependencies:
        if dependency.package == "google.protobuf" and dependency.name != "google/protobuf/descriptor.proto":
            names |= _messages(dependency)
    names |= _messages(file)
    for name, enum in file.enum_types_by_name.items():
        names[name] = EnumTypeWrapper(enum)
        names |= {value.name: value.number for value in enum.values}
    # METHODS is keyed by the bare RPC name, so it supports one service only.
    if len(file.services_by_name) > 1:
        raise ValueError(f"{file.name} declares more than one service")
    for service in file.services_by_name.values():
        names |= {"SERVICE": service.full_name, "METHODS": methods(service)}
    return names


def _messages(file: FileDescriptor) -> dict[str, object]:
    return {name: GetMessageClass(message) for name, message in file.message_types_by_name.items()}
