"""SQL92 filter expressions over the properties of a message, compiled once into nested functions.

The language is that of Apache RocketMQ 5: ``=``, ``<>``, ``<``, ``<=``, ``>``, ``>=``, BETWEEN, IN, IS NULL, CONTAINS,
STARTSWITH and ENDSWITH, the words also with NOT; AND, OR, NOT and parentheses. Keywords are case-insensitive, property
names are case-sensitive. ``TAGS`` and ``KEYS`` are the tag of a message and its keys, joined by blanks. Literals are
strings in single quotes with quotes doubled, numbers, TRUE and FALSE.

Properties are strings. In a comparison with a number, a property is parsed as a number. In a comparison with TRUE or
FALSE, it is true if its text is "true" in any case. A property that is missing, or that does not parse as a required
number, makes its condition *unknown*. Unknown is neither true nor false, and its NOT is also unknown. Only a true
expression passes.

More permissive than RocketMQ:

- NOT binds weaker than a comparison (there ``NOT a = 1`` never passes).
- IN allows numbers, and 5.0 equals 5.
- An impossible comparison does not fail the other operands of OR.

Stricter than RocketMQ:

- A property alone is not a condition (there it never passes).
- The argument of CONTAINS, STARTSWITH and ENDSWITH must not be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple

from lark import Lark, Token
from lark.exceptions import LarkError, UnexpectedCharacters, UnexpectedToken

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.filters.sql_terms import Condition, FilterTransformer, WrongTerm, condition_of

CHARS_MAX = 8192
TOKENS_MAX = 2048  # the parser needs some 3 microseconds for each
COMPILED_KEPT = 256
_NEAR_CHARS = 20
_TOKEN = re.compile(r"'(?:''|[^'])*'|[\w$.]+|[^\s\w]")  # approximate: signs of two characters count twice

_GRAMMAR = r"""
start: any_of
?any_of: all_of (_OR all_of)*
?all_of: negatable (_AND negatable)*
?negatable: negation | predicate
negation: NOT negatable

?predicate: operand
    | operand COMPARE operand                        -> compared
    | operand IS NULL                                -> is_null
    | operand IS NOT NULL                            -> is_not_null
    | operand BETWEEN operand _AND operand           -> between
    | operand NOT BETWEEN operand _AND operand       -> not_between
    | operand IN "(" literal ("," literal)* ")"      -> is_in
    | operand NOT IN "(" literal ("," literal)* ")"  -> is_not_in
    | operand TEXT_TEST literal                      -> tested
    | operand NOT TEXT_TEST literal                  -> not_tested

?operand: literal
    | NAME -> name
    | "(" any_of ")"
?literal: STRING -> text
    | SIGN? NUMBER -> number
    | TRUE -> true
    | FALSE -> false
    | NULL -> null

COMPARE: "<=" | ">=" | "<>" | "=" | "<" | ">"
SIGN: "-" | "+"
_OR.2: /OR(?![A-Z0-9_$])/i
_AND.2: /AND(?![A-Z0-9_$])/i
NOT.2: /NOT(?![A-Z0-9_$])/i
IS.2: /IS(?![A-Z0-9_$])/i
IN.2: /IN(?![A-Z0-9_$])/i
NULL.2: /NULL(?![A-Z0-9_$])/i
TRUE.2: /TRUE(?![A-Z0-9_$])/i
FALSE.2: /FALSE(?![A-Z0-9_$])/i
BETWEEN.2: /BETWEEN(?![A-Z0-9_$])/i
TEXT_TEST.2: /(CONTAINS|STARTSWITH|ENDSWITH)(?![A-Z0-9_$])/i
NAME: /[A-Z_$][A-Z0-9_$]*/i
NUMBER: /([0-9]+(\.[0-9]*)?|\.[0-9]+)(E[+-]?[0-9]+)?L?(?![A-Z0-9_$.])/i
STRING: /'(?:''|[^'])*'/
COMMENT: /--[^\r\n]*/ | /\/\*(?:[^*]|\*(?!\/))*\*\//
%ignore COMMENT
%ignore /[ \t\r\n\f]+/
"""


class SqlFilter:
    """Compiled expression."""

    __slots__ = ("_condition", "text")

    def __init__(self, text: str, condition: Condition) -> None:
        self.text = text
        self._condition = condition

    def passes(self, properties: Mapping[str, str]) -> bool:
        """Return True if the expression is true for these properties; never raises."""
        return self._condition(properties) is True


class _Wrong(NamedTuple):
    why: str
    position: int  # of the character, from 1


def compile_sql(text: str) -> SqlFilter:
    """Return a filter, cached if possible; raise ``Refused(FILTER)`` with the error and its position."""
    if len(text) > CHARS_MAX:
        limit = f"{CHARS_MAX} characters"
        raise Refused(Rule.FILTER, "the SQL expression is too long", value=len(text), limit=limit)
    found = _compiled(text)
    if isinstance(found, _Wrong):
        value = text[max(0, found.position - 1) :][:_NEAR_CHARS]
        raise Refused(Rule.FILTER, f"{found.why}, at position {found.position}", value=value)
    return found


@lru_cache(maxsize=COMPILED_KEPT)
def _compiled(text: str) -> SqlFilter | _Wrong:
    # Invalid ones are cached too, because a consumer repeats its expression with every receive.
    beyond = next(islice(_TOKEN.finditer(text), TOKENS_MAX, None), None)
    if beyond is not None:
        return _Wrong(f"more than {TOKENS_MAX} words, values and signs", beyond.start() + 1)
    try:
        term: Any = _parser().parse(text)
        return SqlFilter(text, condition_of(term))
    except WrongTerm as wrong:
        return _Wrong(wrong.why, wrong.at + 1)
    except UnexpectedCharacters as wrong:
        at: Any = wrong.pos_in_stream  # declared as None
        why = "the string has no end" if text[at : at + 1] == "'" else "a character is not understood"
        return _Wrong(why, at + 1)
    except UnexpectedToken as wrong:
        token: Token = wrong.token
        if token.type == "$END":
            why = "the expression ends too early" if text.strip() else "the expression is empty"
            return _Wrong(why, len(text) + 1)
        return _Wrong(f"{token.value[:_NEAR_CHARS]!r} is not expected", (token.start_pos or 0) + 1)
    except LarkError as wrong:
        return _Wrong(f"the expression cannot be read: {type(wrong).__name__}", 1)


@cache
def _parser() -> Lark:
    # With a transformer the parser builds no tree: it calls the methods as it reduces the rules.
    return Lark(_GRAMMAR, parser="lalr", transformer=FilterTransformer(), maybe_placeholders=False)
