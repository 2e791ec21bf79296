"""The language of SQL92 filters: what passes, what is unknown, and what is refused at which position."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.filters import sql as sql_filter
from dmq.broker.filters.sql import compile_sql
from dmq.broker.filters.sql_terms import CONDITIONS_MAX, DEPTH_MAX, NUMBER_CHARS_MAX

MESSAGE = {
    "amount": "10",
    "price": "5.0",
    "region": "hangzhou",
    "paid": "True",
    "big": "9007199254740993",
    "empty": "",
    "underscored": "1_000",
    "TAGS": "red",
}


def truth(text: str, properties: Mapping[str, str] = MESSAGE) -> bool | None:
    """What an expression is: NOT tells false from unknown."""
    if compile_sql(text).passes(properties):
        return True
    return False if compile_sql(f"NOT ({text})").passes(properties) else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # numbers
        ("amount = 10", True),
        ("amount = 10L", True),
        ("amount = 10.0", True),
        ("amount = 1E1", True),
        ("price = 5", True),
        ("amount <> 10", False),
        ("amount < 10", False),
        ("amount <= 10", True),
        ("amount > +9.5", True),
        ("amount >= - 10", True),
        ("9 < amount", True),
        ("10 <= amount", True),
        ("amount > price", True),
        ("price >= amount", False),
        ("1 < 2", True),
        ("big = 9007199254740993", True),
        ("big = 9007199254740992", False),
        ("amount BETWEEN 10 AND 20", True),
        ("amount BETWEEN 0 AND 10", True),
        ("amount BETWEEN 11 AND 20", False),
        ("amount NOT BETWEEN 11 AND 20", True),
        ("amount BETWEEN price AND 20", True),
        ("7 BETWEEN price AND amount", True),
        # strings
        ("region = 'hangzhou'", True),
        ("'hangzhou' = region", True),
        ("region <> 'hangzhou'", False),
        ("region = 'Hangzhou'", False),
        ("region = 'it''s'", False),
        ("empty = ''", True),
        ("amount = '10'", True),
        ("amount = '10.0'", False),
        ("amount = price", False),
        ("region IN ('beijing', 'hangzhou')", True),
        ("region NOT IN ('beijing', 'hangzhou')", False),
        ("amount IN (1, 10.0, 'x')", True),
        ("region CONTAINS 'gzh'", True),
        ("region NOT CONTAINS 'gzh'", False),
        ("region STARTSWITH 'hang'", True),
        ("region NOT STARTSWITH 'zhou'", True),
        ("region ENDSWITH 'zhou'", True),
        ("region NOT ENDSWITH 'hang'", True),
        # truth
        ("TRUE", True),
        ("FALSE OR paid = TRUE", True),
        ("paid = FALSE", False),
        ("TRUE = paid", True),
        ("region = TRUE", False),
        ("(amount > 5) = TRUE", True),
        ("(amount > 5) <> (price > 5)", True),
        ("paid = (amount > 5)", True),
        # NULL
        ("nothing IS NULL", True),
        ("nothing IS NOT NULL", False),
        ("region IS NULL", False),
        ("empty IS NOT NULL", True),
        ("nothing = 1", None),
        ("nothing <> 1", None),
        ("nothing = 'x'", None),
        ("nothing <> 'x'", None),
        ("nothing > amount", None),
        ("nothing = region", None),
        ("nothing = TRUE", None),
        ("nothing IN ('x')", None),
        ("nothing NOT IN ('x')", None),
        ("nothing BETWEEN 1 AND 2", None),
        ("nothing CONTAINS 'x'", None),
        ("nothing NOT STARTSWITH 'x'", None),
        ("nothing = 1 AND FALSE", False),
        ("nothing = 1 AND TRUE", None),
        ("nothing = 1 OR TRUE", True),
        ("nothing = 1 OR FALSE", None),
        # no numbers
        ("region > 5", None),
        ("region = 5", None),
        ("region <> 5", None),
        ("empty = 0", None),
        ("underscored = 1000", None),
        ("region IN (5)", None),
        ("region IN (5, 'hangzhou')", True),
        ("region > amount", None),
        # binding
        ("NOT amount = 10", False),
        ("NOT amount = 9 AND region = 'x'", False),
        ("TRUE OR FALSE AND FALSE", True),
        ("(TRUE OR FALSE) AND FALSE", False),
        ("amount BETWEEN 1 AND 20 AND region = 'x'", False),
        # words
        ("amount between 1 and 20 or not paid = true", True),
        ("TAGS = 'red'", True),
        ("TAGS IN ('blue', 'red') AND amount > 1", True),
        ("nothing IS NULL -- and no more\n AND /* really */ paid = TRUE", True),
        ("NOTHING IS NULL AND inside IS NULL AND $x_1 IS NULL AND _or IS NULL", True),
        ("\tamount=10\r\n", True),
    ],
)
def test_valid_expressions(text: str, expected: bool | None) -> None:
    """True, false or unknown; only true passes."""
    assert truth(text) is expected


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("", 1, "is empty"),
        ("  ", 3, "is empty"),
        ("*", 1, "is not understood"),
        ("a", 1, "write a = TRUE"),
        ("b = 1 AND a", 11, "write a = TRUE"),
        ("'x'", 1, "a string is not a condition"),
        ("5 OR a = 1", 1, "a number is not a condition"),
        ("NULL", 1, "NULL is not a condition"),
        ("a =", 4, "ends too early"),
        ("a = 1 AND", 10, "ends too early"),
        ("(a = 1", 7, "ends too early"),
        ("a = 1)", 6, "')' is not expected"),
        ("a = 1 b = 2", 7, "'b' is not expected"),
        ("a == 1", 4, "'=' is not expected"),
        ("a != 1", 3, "is not understood"),
        ("a = 'x", 5, "the string has no end"),
        ('a = "x"', 5, "is not understood"),
        ("a LIKE 'x'", 3, "'LIKE' is not expected"),
        ("a = NULL", 5, "use IS NULL"),
        ("NULL <> a", 1, "use IS NULL"),
        ("a > 'x'", 5, "cannot be ordered; only numbers"),
        ("TRUE < a", 1, "cannot be ordered; only numbers"),
        ("(a = 1) > 1", 2, "cannot be ordered; only numbers"),
        ("a BETWEEN 'x' AND 'y'", 11, "cannot be ordered; only numbers"),
        ("a BETWEEN 2 AND 1", 11, "above the second"),
        ("'x' = 5", 7, "cannot be compared"),
        ("(a = 1) = 5", 11, "cannot be compared"),
        ("a = 1 = TRUE", 7, "'=' is not expected"),
        ("5 IS NULL", 1, "requires a property on its left"),
        ("5 IN (5)", 1, "requires a property on its left"),
        ("a IN ()", 7, "')' is not expected"),
        ("a IN (TRUE)", 7, "IN accepts strings and numbers"),
        ("a IN (b)", 7, "'b' is not expected"),
        ("a CONTAINS ''", 12, "a non-empty string"),
        ("a CONTAINS 5", 12, "a non-empty string"),
        ("5 STARTSWITH 'x'", 1, "STARTSWITH requires a property"),
        ("a CONTAINS b", 12, "'b' is not expected"),
        ("a = 1e999", 5, "too large"),
        ("1a = 1", 1, "is not understood"),
        ("a = 1; b", 6, "is not understood"),
        ("a = \0", 5, "is not understood"),
        ("NOT " * (DEPTH_MAX + 1) + "a = 1", None, "nested conditions"),
        (" OR ".join(["a = 1"] * (CONDITIONS_MAX + 1)), None, "more than 256 comparisons"),
        ("(" * 2000, 2001, "ends too early"),
    ],
)
def test_a_wrong_expression_is_refused_with_its_position(text: str, position: int | None, why: str) -> None:
    """Also the second time, when the answer is remembered."""
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            compile_sql(text)
        assert refused.value.rule is Rule.FILTER
        assert why in refused.value.why
        if position is not None:
            assert refused.value.why.endswith(f"at position {position}")


def test_bounds() -> None:
    """As long, as deep and as wide as may be, and no longer; parentheses alone cost nothing."""
    compile_sql("NOT " * (DEPTH_MAX - 1) + "a = 1")
    compile_sql(" OR ".join(["a = 1"] * CONDITIONS_MAX))
    nested = "(" * 1000 + "a = 1" + ")" * 1000
    assert compile_sql(nested).passes({"a": "1"})
    names = ", ".join(f"'{number}'" for number in range(1000))
    assert compile_sql(f"a IN ({names})").passes({"a": "999"})
    with pytest.raises(Refused, match="too long, got 8193, limit 8192 characters"):
        compile_sql("a = 1" + " " * (sql_filter.CHARS_MAX - 4))
    with pytest.raises(Refused, match="more than 2048 words, values and signs, at position 2049"):
        compile_sql("(" * 3000)


def test_a_very_long_number_is_none() -> None:
    """To read one of 4,300 digits takes as long as a thousand comparisons."""
    assert compile_sql("a > 1").passes({"a": "9" * NUMBER_CHARS_MAX})
    assert not compile_sql("a > 1").passes({"a": "9" * (NUMBER_CHARS_MAX + 1)})
    assert compile_sql(f"a = '{'9' * 100}'").passes({"a": "9" * 100})


def test_an_expression_is_compiled_once() -> None:
    """As long as it is among those that are kept, of which there are not too many."""
    first = compile_sql("once = 1")
    assert compile_sql("once = 1") is first
    for number in range(sql_filter.COMPILED_KEPT + 1):
        compile_sql(f"a = {number}")
    assert compile_sql("once = 1") is not first


@given(st.text(alphabet="ab10.'()=<>- \nANDORNOTULISBEWCX,*/$_;", max_size=40) | st.text(max_size=20))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    """Nothing else is raised, whatever a client writes, and what was compiled never raises."""
    try:
        found = compile_sql(text)
    except Refused as refused:
        assert refused.rule is Rule.FILTER  # noqa: PT017 - both ways are good
        return
    for properties in ({}, MESSAGE, {"a": "1", "b": "x"}, {"a": "9" * 5000, "b": "1e999"}):
        found.passes(properties)


# -- against an interpreter of its own --------------------------------------------------------------------------------

Properties = Mapping[str, str]
Meaning = Callable[[Properties], bool | None]
_names = st.sampled_from(("a", "b", "c"))
_values = st.sampled_from(("1", "2", "10", "x", "true", ""))


def _number(properties: Properties, name: str) -> float | None:
    text = properties.get(name)
    return float(text) if text is not None and text.isdecimal() else None


@st.composite
def leaves(draw: st.DrawFn) -> tuple[str, Meaning]:
    """A comparison, and what it means."""
    name, other = draw(_names), draw(_names)
    number, value = draw(st.integers(0, 11)), draw(_values)

    def known(test: Callable[[str], bool]) -> Meaning:
        return lambda properties: None if (text := properties.get(name)) is None else test(text)

    def numeric(test: Callable[[float], bool]) -> Meaning:
        return lambda properties: None if (found := _number(properties, name)) is None else test(found)

    def numbers(properties: Properties) -> bool | None:
        left, right = _number(properties, name), _number(properties, other)
        return None if left is None or right is None else left < right

    choices: list[tuple[str, Meaning]] = [
        (f"{name} = {number}", numeric(lambda found: found == number)),
        (f"{number} > {name}", numeric(lambda found: found < number)),
        (f"{name} <> {number}", numeric(lambda found: found != number)),
        (f"{name} >= {number}", numeric(lambda found: found >= number)),
        (f"{name} NOT BETWEEN {number} AND 10", numeric(lambda found: not number <= found <= 10))
        if number <= 10
        else (f"{name} < {number}", numeric(lambda found: found < number)),
        (f"{name} < {other}", numbers),
        (f"{name} = '{value}'", known(lambda text: text == value)),
        (f"{name} <> '{value}'", known(lambda text: text != value)),
        (f"{name} IN ('{value}', 'x')", known(lambda text: text in {value, "x"})),
        (f"{name} NOT IN ('{value}')", known(lambda text: text != value)),
        (f"{name} STARTSWITH '1'", known(lambda text: text.startswith("1"))),
        (f"{name} NOT CONTAINS 'u'", known(lambda text: "u" not in text)),
        (f"{name} = TRUE", known(lambda text: text == "true")),
        (f"{name} IS NULL", lambda properties: name not in properties),
        (f"{name} IS NOT NULL", lambda properties: name in properties),
    ]
    return draw(st.sampled_from(choices))


def _joined(word: str, parts: list[tuple[str, Meaning]]) -> tuple[str, Meaning]:
    decisive = word == "OR"

    def meaning(properties: Properties) -> bool | None:
        truths = [part(properties) for _, part in parts]
        if decisive in truths:
            return decisive
        return None if None in truths else not decisive

    return f" {word} ".join(f"({text})" for text, _ in parts), meaning


def _not(part: tuple[str, Meaning]) -> tuple[str, Meaning]:
    text, inner = part
    return f"NOT ({text})", lambda properties: None if (found := inner(properties)) is None else not found


expressions = st.recursive(
    leaves(),
    lambda inner: (
        st.tuples(st.sampled_from(("AND", "OR")), st.lists(inner, min_size=2, max_size=4)).map(
            lambda drawn: _joined(drawn[0], drawn[1])
        )
        | inner.map(_not)
    ),
    max_leaves=12,
)


@given(expressions, st.lists(st.dictionaries(_names, _values), min_size=1, max_size=6))
def test_an_expression_combines_its_parts(expression: tuple[str, Meaning], messages: list[dict[str, str]]) -> None:
    """Any expression on any message: as an interpreter says that walks the parts one by one."""
    text, meaning = expression
    for properties in messages:
        assert truth(text, properties) is meaning(properties), (text, properties)
