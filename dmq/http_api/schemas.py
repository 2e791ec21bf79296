"""Models of requests and schemas of answers, from the descriptors of ``rockdmq.admin.v1``.

A field has one name and one meaning in gRPC and in JSON. Answers are those of ``dmq --json`` for the same call.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model, model_validator

PAGE_DEFAULT: Final = 100
PAGE_MAX: Final = 1_000
REF: Final = "#/components/schemas/{model}"

_INT32: Final = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_INT64: Final = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_LIMIT: Final = Annotated[int, Field(ge=1, le=PAGE_MAX)]
# Fields that the daemon sets: they have no meaning in a request.
_ONLY_ANSWERED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "Schedule": frozenset(
            ("created_at_ms", "state", "occurrences", "last_at_ms", "next_at_ms", "following_at_ms", "why")
        ),
        "Content": frozenset(("body_bytes", "born_at_ms", "born_host", "masking")),
    }
)


def _base64(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a string in base64 is expected")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a string in base64 is expected") from None


Base64 = Annotated[
    bytes, BeforeValidator(_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"}, mode="validation")
]


class Request(BaseModel):
    """Base of all models: unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    one_ofs: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @model_validator(mode="after")
    def _check_one_ofs(self) -> Self:
        for names in self.one_ofs:
            given = [name for name in names if name in self.model_fields_set]
            if len(given) > 1:
                raise ValueError(f"give one of these fields only: {', '.join(given)}")
        return self

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, and defaults other than None."""
        return self.model_dump(exclude_none=True)


class Query(Request):
    """Base of models of parameters in paths and queries, which are texts."""

    model_config = ConfigDict(strict=False)


def model_of(
    message: Descriptor,
    *,
    name: str,
    without: Collection[str] = (),
    required: Collection[str] = (),
    is_query: bool = False,
) -> type[Request]:
    """Return the model of a request without some fields. In a query, the fields of a message in it are parameters."""
    fields: dict[str, Any] = {}
    for field in _fields(message, flat=is_query):
        if field.name in without:
            continue
        kind = _LIMIT if field.name == "limit" else _type(field)
        if field.name in required:
            fields[field.name] = (kind, ...)
        elif field.name == "limit":
            fields[field.name] = (kind, PAGE_DEFAULT)
        else:
            fields[field.name] = (kind, Field(default_factory=lambda: None))
    made: type[Request] = create_model(name, __base__=Query if is_query else Request, **fields)
    made.one_ofs = tuple(
        names
        for each in message.oneofs
        if len(names := tuple(field.name for field in each.fields if field.name not in without)) > 1
    )
    return made


def request_fields(message: Descriptor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request from query parameters: undo the flattening of ``model_of``."""
    made: dict[str, Any] = {}
    for field in message.fields:
        if field.name in values:
            made[field.name] = values[field.name]
        elif (message_type := _message_in(field)) is not None:
            inner = {each.name: values[each.name] for each in message_type.fields if each.name in values}
            made |= {field.name: inner} if inner else {}
    return made


def answer_schema(message: Descriptor, components: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of an answer, which is added to ``components`` with the schemas in it."""
    if message.name not in components:
        components[message.name] = {}  # it ends a recursion
        properties = {field.name: _answered(field, components) for field in message.fields}
        components[message.name] = {"type": "object", "properties": properties, "required": list(properties)}
    return {"$ref": REF.format(model=message.name)}


def is_repeated(message: Descriptor, name: str) -> bool:
    """Return True if a query parameter may be repeated."""
    return any(field.name == name and field.is_repeated for field in _fields(message, flat=True))


def _fields(message: Descriptor, *, flat: bool) -> Iterator[FieldDescriptor]:
    for field in message.fields:
        if flat and (message_type := _message_in(field)) is not None:
            yield from message_type.fields
        else:
            yield field


def _message_in(field: FieldDescriptor) -> Descriptor | None:
    return None if field.is_repeated else field.message_type


def _type(field: FieldDescriptor) -> Any:  # noqa: ANN401 - a type for pydantic
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict[str, str]
    one = _one_type(field)
    return GenericAlias(list, (one,)) if field.is_repeated else one


def _one_type(field: FieldDescriptor) -> Any:  # noqa: ANN401
    if field.message_type is not None:
        return _nested(field.message_type)
    if field.enum_type is not None:
        return Literal[tuple(_words(field.enum_type))]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32:
            return _INT32
        case FieldDescriptor.CPPTYPE_INT64:
            return _INT64
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return Annotated[float, Field(allow_inf_nan=False)]
    return Base64 if field.type == FieldDescriptor.TYPE_BYTES else str


@cache
def _nested(message: Descriptor) -> type[Request]:
    return model_of(message, name=f"{message.name}Input", without=_ONLY_ANSWERED.get(message.name, ()))


def _words(enum: EnumDescriptor) -> list[str]:
    return [value.name for value in enum.values if not value.name.endswith("_UNSPECIFIED")]


def _answered(field: FieldDescriptor, components: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    one = _one_answered(field, components)
    if field.is_repeated:
        return {"type": "array", "items": one}
    can_be_null = field.has_presence or (
        field.enum_type is not None and len(_words(field.enum_type)) < len(field.enum_type.values)
    )
    return {"anyOf": [one, {"type": "null"}]} if can_be_null else one


def _one_answered(field: FieldDescriptor, components: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        return answer_schema(field.message_type, components)
    if field.enum_type is not None:  # a newer daemon has further values, which are numbers here
        return {"anyOf": [{"type": "string", "enum": _words(field.enum_type)}, {"type": "integer"}]}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "contentEncoding": "base64"}
    kinds = {
        FieldDescriptor.CPPTYPE_INT32: "integer",
        FieldDescriptor.CPPTYPE_INT64: "integer",
        FieldDescriptor.CPPTYPE_BOOL: "boolean",
        FieldDescriptor.CPPTYPE_DOUBLE: "number",
    }
    return {"type": kinds.get(field.cpp_type, "string")}
