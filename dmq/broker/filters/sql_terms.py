"""Semantics of SQL92 filter expressions: converts the parser's tokens to nested functions, innermost first.

A condition is a function of a message's properties that returns true, false, or ``None`` for unknown. The parser calls
one method of ``FilterTransformer`` per rule of the grammar (``dmq.broker.filters.sql``), innermost first. So no code
here recurses over the client's expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from math import isfinite
from typing import NamedTuple

from lark import Token, Transformer

DEPTH_MAX = 64
CONDITIONS_MAX = 256  # comparisons of one expression, each about a microsecond
NUMBER_CHARS_MAX = 64  # of a property: parsing a longer one costs far more than a comparison

Condition = Callable[[Mapping[str, str]], bool | None]
_Number = int | float
_Ordering = Callable[[_Number, _Number], bool]

_ORDERINGS: Mapping[str, _Ordering] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TURNED: Mapping[_Ordering, _Ordering] = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}
_TEXT_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


class WrongTerm(Exception):
    """Invalid part of an expression; ``at`` is its position, from 0."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why, at)
        self.why = why
        self.at = at


class Kind(Enum):
    """Kind of a term; the value is its name in error texts."""

    CONDITION = "a condition"
    PROPERTY = "a property"
    TEXT = "a string"
    NUMBER = "a number"
    BOOLEAN = "TRUE or FALSE"
    NULL = "NULL"


class FilterTerm(NamedTuple):
    """BrokerPart of an expression. ``of`` is a condition, the name of a property, or the value of a literal."""

    kind: Kind
    of: Condition | str | _Number | None
    at: int
    depth: int = 0
    conditions: int = 0


def number_of(text: str) -> _Number | None:
    """Parse a property as a number, exactly if it is an integer; return None if it is not a number, or too long."""
    if len(text) > NUMBER_CHARS_MAX or "_" in text or not text.isascii():  # Python would parse these
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


class FilterTransformer(Transformer[Token, FilterTerm]):
    """One method per rule of the grammar; the arguments are the terms and tokens of the rule."""

    # -- operands -----------------------------------------------------------------------------------------------------

    def name(self, parts: Sequence[Token]) -> FilterTerm:
        return FilterTerm(Kind.PROPERTY, str(parts[0]), _at(parts[0]))

    def text(self, parts: Sequence[Token]) -> FilterTerm:
        return FilterTerm(Kind.TEXT, parts[0][1:-1].replace("''", "'"), _at(parts[0]))

    def number(self, parts: Sequence[Token]) -> FilterTerm:
        written = "".join(parts).rstrip("lL")
        number = number_of(written)
        if number is None:
            raise WrongTerm("the number is too large", _at(parts[0]))
        return FilterTerm(Kind.NUMBER, number, _at(parts[0]))

    def true(self, parts: Sequence[Token]) -> FilterTerm:
        return FilterTerm(Kind.BOOLEAN, True, _at(parts[0]))

    def false(self, parts: Sequence[Token]) -> FilterTerm:
        return FilterTerm(Kind.BOOLEAN, False, _at(parts[0]))

    def null(self, parts: Sequence[Token]) -> FilterTerm:
        return FilterTerm(Kind.NULL, None, _at(parts[0]))

    # -- logic --------------------------------------------------------------------------------------------------------

    def start(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return FilterTerm(Kind.CONDITION, condition_of(parts[0]), parts[0].at)

    def any_of(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        conditions = [condition_of(part) for part in parts]
        return _condition(_joined(conditions, decisive=True), *parts)

    def all_of(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        conditions = [condition_of(part) for part in parts]
        return _condition(_joined(conditions, decisive=False), *parts)

    def negation(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return _condition(_negated(condition_of(parts[1])), parts[1])

    # -- predicates ---------------------------------------------------------------------------------------------------

    def compared(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        left, sign, right = parts[0], str(parts[1]), parts[2]
        ordering = _ORDERINGS.get(sign)
        if ordering is not None:
            return _condition(_ordered(left, ordering, right), left, right, adds=1)
        equal = _equal(left, right)
        return _condition(equal if sign == "=" else _negated(equal), left, right, adds=1)

    def between(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        value, low, high = parts[0], parts[-2], parts[-1]
        return _condition(_between(value, low, high), value, low, high, adds=2)

    def not_between(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        value, low, high = parts[0], parts[-2], parts[-1]
        return _condition(_negated(_between(value, low, high)), value, low, high, adds=2)

    def is_null(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        name = _property(parts[0], "IS NULL")
        return _condition(lambda properties: name not in properties, parts[0], adds=1)

    def is_not_null(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        name = _property(parts[0], "IS NOT NULL")
        return _condition(lambda properties: name in properties, parts[0], adds=1)

    def is_in(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return _condition(_is_in(parts[0], parts[2:]), parts[0], adds=1)

    def is_not_in(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return _condition(_negated(_is_in(parts[0], parts[3:])), parts[0], adds=1)

    def tested(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return _condition(_tested(parts[0], str(parts[1]), parts[2]), parts[0], adds=1)

    def not_tested(self, parts: Sequence[FilterTerm]) -> FilterTerm:
        return _condition(_negated(_tested(parts[0], str(parts[2]), parts[3])), parts[0], adds=1)


def _at(token: Token) -> int:
    return token.start_pos or 0


def _condition(condition: Condition, *parts: FilterTerm, adds: int = 0) -> FilterTerm:
    """Return a condition made of ``parts``; raise ``WrongTerm`` beyond the limits of an expression."""
    at = parts[0].at
    depth = max(part.depth for part in parts) + 1
    conditions = sum(part.conditions for part in parts) + adds
    if depth > DEPTH_MAX:
        raise WrongTerm(f"more than {DEPTH_MAX} nested conditions", at)
    if conditions > CONDITIONS_MAX:
        raise WrongTerm(f"more than {CONDITIONS_MAX} comparisons", parts[-1].at)
    return FilterTerm(Kind.CONDITION, condition, at, depth, conditions)


def condition_of(term: FilterTerm) -> Condition:
    """Return the condition of a term; raise ``WrongTerm`` if it is not one."""
    if term.kind is Kind.CONDITION and callable(term.of):
        return term.of
    if term.kind is Kind.BOOLEAN:
        truth = bool(term.of)
        return lambda _: truth
    hint = f": write {term.of} = TRUE" if term.kind is Kind.PROPERTY else ""
    raise WrongTerm(f"{term.kind.value} is not a condition{hint}", term.at)


def _property(term: FilterTerm, what: str) -> str:
    if term.kind is not Kind.PROPERTY:
        raise WrongTerm(f"{what} requires a property on its left, not {term.kind.value}", term.at)
    return str(term.of)


# -- three-valued logic -----------------------------------------------------------------------------------------------


def _negated(condition: Condition) -> Condition:
    def negated(properties: Mapping[str, str]) -> bool | None:
        truth = condition(properties)
        return None if truth is None else not truth

    return negated


def _joined(conditions: Sequence[Condition], *, decisive: bool) -> Condition:
    """Join conditions by AND, which one False decides, or by OR, which one True decides."""

    def joined(properties: Mapping[str, str]) -> bool | None:
        result: bool | None = not decisive
        for condition in conditions:
            truth = condition(properties)
            if truth is decisive:
                return decisive
            if truth is None:
                result = None
        return result

    return joined


# -- comparisons ------------------------------------------------------------------------------------------------------


def _ordered(left: FilterTerm, ordering: _Ordering, right: FilterTerm) -> Condition:
    for term in (left, right):
        if term.kind not in {Kind.PROPERTY, Kind.NUMBER}:
            raise WrongTerm(f"{term.kind.value} cannot be ordered; only numbers can", term.at)
    match left.of, right.of:
        case str(first), str(second):
            return partial(_ordered_properties, first, ordering, second)
        case str(name), (int() | float()) as number:
            return _beside_number(name, ordering, number)
        case (int() | float()) as number, str(name):
            return _beside_number(name, _TURNED[ordering], number)
        case (int() | float()) as one, (int() | float()) as other:
            truth = ordering(one, other)
            return lambda _: truth
    raise AssertionError(left, right)


def _beside_number(name: str, compare: _Ordering, number: _Number) -> Condition:
    def compared(properties: Mapping[str, str]) -> bool | None:
        text = properties.get(name)
        value = number_of(text) if text is not None else None
        return None if value is None else compare(value, number)

    return compared


def _ordered_properties(first: str, ordering: _Ordering, second: str, properties: Mapping[str, str]) -> bool | None:
    left, right = number_of(properties.get(first, "")), number_of(properties.get(second, ""))
    return None if left is None or right is None else ordering(left, right)


def _between(value: FilterTerm, low: FilterTerm, high: FilterTerm) -> Condition:
    if isinstance(low.of, int | float) and isinstance(high.of, int | float) and low.of > high.of:
        raise WrongTerm("the first bound of BETWEEN is above the second", low.at)
    return _joined([_ordered(value, operator.ge, low), _ordered(value, operator.le, high)], decisive=False)


def _equal(left: FilterTerm, right: FilterTerm) -> Condition:
    for term in (left, right):
        if term.kind is Kind.NULL:
            raise WrongTerm("nothing equals NULL; use IS NULL or IS NOT NULL", term.at)
    if left.kind is not Kind.PROPERTY and right.kind is Kind.PROPERTY:
        left, right = right, left
    if left.kind is not Kind.PROPERTY:
        return _equal_values(left, right)
    name = str(left.of)
    match right.kind, right.of:
        case Kind.NUMBER, (int() | float()) as number:
            return _beside_number(name, operator.eq, number)
        case Kind.TEXT, text:
            return lambda properties: None if (found := properties.get(name)) is None else found == text
        case Kind.PROPERTY, str(other):
            return partial(_same_text, name, other)
        case _:
            return _same_truth(partial(_truth_of, name), condition_of(right))


def _equal_values(left: FilterTerm, right: FilterTerm) -> Condition:
    logical = {Kind.CONDITION, Kind.BOOLEAN}
    if left.kind in logical and right.kind in logical:
        return _same_truth(condition_of(left), condition_of(right))
    if left.kind is not right.kind:
        raise WrongTerm(f"{right.kind.value} cannot be compared with {left.kind.value}", right.at)
    truth = left.of == right.of
    return lambda _: truth


def _same_text(first: str, second: str, properties: Mapping[str, str]) -> bool | None:
    left, right = properties.get(first), properties.get(second)
    return None if left is None or right is None else left == right


def _truth_of(name: str, properties: Mapping[str, str]) -> bool | None:
    text = properties.get(name)
    return None if text is None else len(text) == len("true") and text.lower() == "true"


def _same_truth(first: Condition, second: Condition) -> Condition:
    def same(properties: Mapping[str, str]) -> bool | None:
        left, right = first(properties), second(properties)
        return None if left is None or right is None else left == right

    return same


# -- sets and texts ---------------------------------------------------------------------------------------------------


def _is_in(value: FilterTerm, elements: Sequence[FilterTerm]) -> Condition:
    name = _property(value, "IN")
    for element in elements:
        if element.kind not in {Kind.TEXT, Kind.NUMBER}:
            raise WrongTerm(f"IN accepts strings and numbers, not {element.kind.value}", element.at)
    texts = frozenset(str(element.of) for element in elements if element.kind is Kind.TEXT)
    numbers = frozenset(element.of for element in elements if element.kind is Kind.NUMBER)

    def is_in(properties: Mapping[str, str]) -> bool | None:
        text = properties.get(name)
        if text is None:
            return None
        if text in texts:
            return True
        if not numbers:
            return False
        number = number_of(text)
        return None if number is None else number in numbers

    return is_in


def _tested(value: FilterTerm, word: str, sought: FilterTerm) -> Condition:
    name = _property(value, word.upper())
    if sought.kind is not Kind.TEXT or not sought.of:
        raise WrongTerm(f"{word.upper()} requires a non-empty string on its right", sought.at)
    test, part = _TEXT_TESTS[word.upper()], str(sought.of)
    return lambda properties: None if (text := properties.get(name)) is None else test(text, part)
