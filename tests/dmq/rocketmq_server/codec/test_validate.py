"""Every refusal of a send and of a receive: its rule, with the limit and the value in its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, MESSAGES_PER_SEND_MAX
from broker_adapter.contracts.own_keys import ON_SAME_KEY, OWN_KEY
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import NOT_AFTER_MS, to_envelope
from dmq.rocketmq_server.codec import validate
from dmq.rocketmq_server.codec.delay import DELAY_PROPERTIES


def message(topic: str = "orders", **system: object) -> wire.Message:
    properties = wire.SystemProperties(message_id="01AB")
    for name, value in system.items():
        if name == "keys":
            properties.keys.extend(value)  # type: ignore[arg-type]
        else:
            setattr(properties, name, value)
    return wire.Message(topic=wire.Resource(name=topic), system_properties=properties, body=b"body")


def with_properties(properties: dict[str, str]) -> wire.Message:
    made = message()
    made.user_properties.update(properties)
    return made


def with_body(size: int) -> wire.Message:
    made = message()
    made.body = bytes(size)
    return made


def refusal(check: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        check()
    return caught.value


@pytest.mark.parametrize(
    ("bad", "rule", "text"),
    [
        (with_body(0), Rule.BODY_EMPTY, "cannot be empty"),
        (with_body(BODY_BYTES_MAX + 1), Rule.BODY_SIZE, "got 4194305, limit 4194304 bytes"),
        (with_properties({str(n): "" for n in range(129)}), Rule.PROPERTIES_SIZE, "got 129, limit 128"),
        (with_properties({"p": "x" * 16_384}), Rule.PROPERTIES_SIZE, "got 16385, limit 16384 bytes"),
        (with_properties({"p": "\u00fc" * 8192}), Rule.PROPERTIES_SIZE, "got 16385, limit 16384 bytes"),
        (message(tag="t" * 250, keys=["k" * 16_135]), Rule.PROPERTIES_SIZE, "got 16385"),
        (with_properties({"KEYS": "x"}), Rule.PROPERTY_KEY, "'KEYS'"),
        (with_properties({"TRAN_MSG": "true", "a": "b"}), Rule.PROPERTY_KEY, "'TRAN_MSG'"),
        (with_properties({"TIMER_OUT_MS": "1"}), Rule.PROPERTY_KEY, "'TIMER_OUT_MS'"),
        (with_properties({"fine": "", "a\x01b": "x"}), Rule.PROPERTY_KEY, "control character, got 'a\\x01b'"),
        (with_properties({"a": "x\x02y"}), Rule.PROPERTY_KEY, "control character, got 'a'"),
        (with_properties({OWN_KEY: ""}), Rule.PROPERTY_KEY, "limit 1 to 128 bytes of UTF-8"),
        (with_properties({OWN_KEY: "  "}), Rule.PROPERTY_KEY, "spaces alone, got '  '"),
        (with_properties({OWN_KEY: "\u2028"}), Rule.PROPERTY_KEY, "not printable text"),
        (with_properties({OWN_KEY: "k" * 129}), Rule.PROPERTY_KEY, "limit 1 to 128 bytes"),
        (with_properties({OWN_KEY: "\u00fc" * 65}), Rule.PROPERTY_KEY, "limit 1 to 128 bytes"),
        (with_properties({OWN_KEY: "k", ON_SAME_KEY: "refuse"}), Rule.PROPERTY_KEY, "replace nor keep, got 'refuse'"),
        (with_properties({ON_SAME_KEY: "keep"}), Rule.PROPERTY_KEY, "has no effect without property DMQ_KEY"),
        (message(tag="  "), Rule.TAG, "whitespace"),
        (message(tag="a|b"), Rule.TAG, "'a|b'"),
        (message(tag="a\x7f"), Rule.TAG, "control"),
        (message(tag="t" * 16_385), Rule.PROPERTIES_SIZE, "got 16385, limit 16384 bytes"),
        (message(keys=["fine", " "]), Rule.KEY, "whitespace"),
        (message(keys=["a\nb"]), Rule.KEY, "control"),
        (message(message_id=""), Rule.MESSAGE_ID, "cannot be empty"),
        (message(message_id=" "), Rule.MESSAGE_ID, "cannot be empty"),
        (message(message_id="i" * 255), Rule.MESSAGE_ID, "limit 254 bytes"),
        (message(message_id="a\x85"), Rule.MESSAGE_ID, "control"),
        (message(message_group=" "), Rule.MESSAGE_GROUP, "whitespace"),
        (message(message_group="\u00fc" * 32), Rule.MESSAGE_GROUP, "limit 63 bytes"),
        (message(message_group="a\x00"), Rule.MESSAGE_GROUP, "control"),
        (message(message_type=wire.LITE), Rule.UNSUPPORTED, "lite"),
        (message(message_type=wire.PRIORITY), Rule.UNSUPPORTED, "priorities"),
        (message(message_type=2**31 - 1), Rule.MESSAGE_TYPE, "unknown"),
    ],
)
def test_a_bad_message_is_refused_by_its_rule(bad: wire.Message, rule: Rule, text: str) -> None:
    """Each fault alone, with the limit and the offending value named."""
    error = refusal(lambda: validate.check_message(bad))
    assert (error.rule, text in str(error)) == (rule, True), str(error)


SMALL = "the invisibleTime is too small. min is"
LARGE = "the invisibleTime is too large. max is 43200000"
CONTROL = "cannot contain control character"


def of_send(*messages: wire.Message) -> Callable[[], object]:
    def check() -> None:
        validate.check_send(messages)
        for each in messages:
            validate.check_message(each)

    return check


def of_receive(seconds: int) -> Callable[[], object]:
    request = wire.ReceiveMessageRequest(invisible_duration=wire.Duration(seconds=seconds))
    return lambda: validate.receive_invisible_ms(request)


def of_change(seconds: int) -> Callable[[], object]:
    request = wire.ChangeInvisibleDurationRequest(invisible_duration=wire.Duration(seconds=seconds))
    return lambda: validate.change_invisible_ms(request)


def of_topic(name: str) -> Callable[[], object]:
    return lambda: validate.topic_of(wire.Resource(name=name))


def of_group(name: str) -> Callable[[], object]:
    return lambda: validate.group_of(wire.Resource(name=name))


# What Apache's proxy says, by what it says it of. Programs match these words: each stands in our text as it is there.
# Those of a receive that finds nothing, of handles, of types and of transactions are held below and by their services'
# tests. Ours alone, on purpose: an unknown topic (there is no name server to speak of).
WORDS: list[tuple[Callable[[], object], str]] = [
    (of_send(), "no message to send"),
    (of_send(message(), message("other")), "topic in message is not same"),
    (of_send(with_body(0)), "message body cannot be empty"),
    (of_send(with_body(BODY_BYTES_MAX + 1)), "message body cannot exceed the max 4194304"),
    (of_send(message(keys=["  "])), "key cannot be the char sequence of whitespace"),
    (of_send(message(keys=["a\x00"])), f"key {CONTROL}"),
    (of_send(message(message_group="  ")), "message group cannot be the char sequence of whitespace"),
    (of_send(message(message_group="g" * 64)), "message group exceed the max size 64"),
    (of_send(message(message_group="g\x00")), f"message group {CONTROL}"),
    (of_send(message(tag="  ")), "tag cannot be the char sequence of whitespace"),
    (of_send(message(tag="a|b")), "tag cannot contain '|'"),
    (of_send(message(tag="a\x00")), f"tag {CONTROL}"),
    (of_send(with_properties({f"{n}": "" for n in range(129)})), "too many user properties, max is 128"),
    (of_send(with_properties({"KEYS": ""})), "property is used by system: KEYS"),
    (of_send(with_properties({"a\x00": ""})), f"the key of property {CONTROL}"),
    (of_send(with_properties({"a": "\x00"})), f"the value of property {CONTROL}"),
    (of_send(with_properties({"a": "x" * 16_384})), "the total size of user property is too large, max is 16384"),
    (of_send(message(message_id=" ")), "message id cannot be empty"),
    (of_receive(9), f"{SMALL} 10000"),
    (of_receive(43_201), LARGE),
    (of_change(-1), f"{SMALL} 0"),
    (of_change(43_201), LARGE),
    (of_topic(" "), "The specified topic is blank"),
    (of_topic("t" * 128), "The specified topic is longer than topic max length 127."),
    (of_topic("a b"), "The specified topic[a b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
    (of_topic("SCHEDULE_TOPIC_XXXX"), "cannot access system topic"),
    (of_group(" "), "the specified group is blank"),
    (of_group("g" * 121), f"the specified group[{'g' * 121}] is longer than group max length: 120."),
    (of_group("a b"), "the specified group[a b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
    (of_group("CID_RMQ_SYS_A"), "cannot use system consumer group"),
]


@pytest.mark.parametrize(("check", "words"), WORDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refusal_contains_the_words_of_apaches_proxy(check: Callable[[], object], words: str) -> None:
    """Whole and as they are spelt there, with the value that was given behind them."""
    assert words in str(refusal(check))


def test_a_refused_handle_is_expired_as_at_apache() -> None:
    """Whatever else is wrong with it, the text says what Apache's proxy says of every handle that is over."""
    assert "receipt handle is expired" in str(Refused(Rule.RECEIPT_HANDLE, "the message is finished"))


@pytest.mark.parametrize(
    "good",
    [
        with_body(1),
        with_body(BODY_BYTES_MAX),
        with_properties({str(n): "" for n in range(128)}),
        with_properties({"p": "x" * 16_383}),
        with_properties(dict.fromkeys(DELAY_PROPERTIES, "1")),
        with_properties({"__SHARDINGKEY": "x", "TRACE_CONTEXT": "x", "__STARTDELIVERTIME": "x", "": "", "e": ""}),
        message(tag="t" * 16_384),
        message(keys=["k" * 16_384]),
        message(tag="", keys=["", "a"], message_group=""),  # RocketMQ takes them as well
        message(message_id="i" * 254),
        message(message_group="g" * 63),
        message(message_type=wire.FIFO),  # the properties decide, not what the message calls itself
        message(keys=["a", "b c"]),
    ],
)
def test_a_message_at_its_limit_is_fine(good: wire.Message) -> None:
    """The same limits from the other side, and the names that RocketMQ leaves to users."""
    validate.check_message(good)


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([], Rule.MESSAGE_CORRUPTED),
        ([message(), message("other")], Rule.MESSAGE_CORRUPTED),
        ([message("")], Rule.TOPIC),
        ([message("a b")], Rule.TOPIC),
        ([message("SCHEDULE_TOPIC_XXXX")], Rule.TOPIC),
        ([message("rmq_sys_wheel_timer")], Rule.TOPIC),
        ([message("t" * 128)], Rule.TOPIC),
        ([message("%RETRY%billing")], Rule.TOPIC),
        ([message()] * (MESSAGES_PER_SEND_MAX + 1), Rule.REQUEST),
    ],
)
def test_a_bad_send_is_refused_as_a_whole(messages: list[wire.Message], rule: Rule) -> None:
    """What concerns all messages together."""
    assert refusal(lambda: validate.check_send(messages)).rule is rule


def test_differing_namespaces_are_differing_topics() -> None:
    """A namespace is part of the name, as RocketMQ has it."""
    other = message()
    other.topic.resource_namespace = "ns"
    assert "ns%orders" in str(refusal(lambda: validate.check_send([message(), other])))
    assert validate.topic_of(other.topic) == "ns%orders"


def test_a_retry_topic_is_nobodys_and_a_dead_letter_topic_everybodys() -> None:
    """The refusal says where a group's retries are; a namespace goes in front of the group, as in RocketMQ."""
    for resource in (
        wire.Resource(name="%RETRY%billing"),
        wire.Resource(name="%RETRY%billing_orders"),
        wire.Resource(name="%RETRY%billing", resource_namespace="ns"),
    ):
        error = refusal(lambda asked=resource: validate.topic_of(asked))  # type: ignore[misc]
        assert error.rule is Rule.TOPIC
        assert "come to its consumers under the topic that the message was sent to" in str(error)
    assert validate.topic_of(wire.Resource(name="%DLQ%billing")) == "%DLQ%billing"
    assert validate.topic_of(wire.Resource(name="%DLQ%billing", resource_namespace="ns")) == "%DLQ%ns%billing"
    validate.check_send([message("%DLQ%billing")])


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", set()),
        ("", set()),
        ("a", {"a"}),
        ("a || b", {"a", "b"}),
        (" a||b || ", {"a", "b"}),
        ("a b", {"a b"}),
        (" * ", set()),
    ],
)
def test_tag_expressions(expression: str, tags: set[str]) -> None:
    """Alternatives are separated by two bars; a star or nothing means every tag."""
    assert validate.tags_of(wire.FilterExpression(type=wire.TAG, expression=expression)) == tags
    assert validate.tags_of(wire.FilterExpression(expression=expression)) == tags


@pytest.mark.parametrize(
    ("filter_type", "expression", "text"),
    [
        (wire.TAG, "||", "contains no tag"),
        (wire.TAG, "a | b", "cannot contain |"),
        (wire.TAG, "a\x00", "control"),
        (wire.TAG, "a" * 16_385, "got 16385"),
        (7, "a", "type is unknown, got 7"),
    ],
)
def test_bad_filters_are_refused(filter_type: wire.FilterType, expression: str, text: str) -> None:
    """By the filter rule, with what is wrong."""
    bad = wire.FilterExpression(type=filter_type, expression=expression)
    error = refusal(lambda: validate.tags_of(bad))
    assert (error.rule, text in str(error)) == (Rule.FILTER, True), str(error)


def receive(*, invisible: wire.Duration | None = None, polling: wire.Duration | None = None, batch: int = 0) -> object:
    return wire.ReceiveMessageRequest(invisible_duration=invisible, long_polling_timeout=polling, batch_size=batch)


def seconds(value: int, nanos: int = 0) -> wire.Duration:
    return wire.Duration(seconds=value, nanos=nanos)


@pytest.mark.parametrize("wanted", [None, seconds(9, 999_000_000), seconds(43_200, 1), seconds(-10), seconds(2**62)])
def test_an_invisible_duration_out_of_range_is_refused(wanted: wire.Duration | None) -> None:
    """10 s to 12 h on a receive; no int64 overflows anything."""
    request = wire.ReceiveMessageRequest(invisible_duration=wanted)
    assert refusal(lambda: validate.receive_invisible_ms(request)).rule is Rule.INVISIBLE_TIME


@pytest.mark.parametrize("wanted", [seconds(43_200, 1), seconds(-1), seconds(1, 1_000_000_000), seconds(0, -1_000_000)])
def test_a_changed_invisible_duration_out_of_range_is_refused(wanted: wire.Duration) -> None:
    """0 to 12 h on a change, and nanos that are nanos."""
    request = wire.ChangeInvisibleDurationRequest(invisible_duration=wanted)
    assert refusal(lambda: validate.change_invisible_ms(request)).rule is Rule.INVISIBLE_TIME


def test_invisible_durations_in_range() -> None:
    """Both ends, and nothing given on a change, which means at once."""
    for wanted, expected_ms in ((seconds(10), 10_000), (seconds(43_200), 43_200_000), (seconds(30, 500_000), 30_001)):
        assert validate.receive_invisible_ms(wire.ReceiveMessageRequest(invisible_duration=wanted)) == expected_ms
    assert validate.change_invisible_ms(wire.ChangeInvisibleDurationRequest()) == 0


@pytest.mark.parametrize(("asked", "expected"), [(0, 1), (-5, 1), (1, 1), (32, 32), (33, 32), (2**31 - 1, 32)])
def test_a_batch_is_cut_to_the_protocols_bounds(asked: int, expected: int) -> None:
    """Too many is no error, nor is none."""
    assert validate.batch_of(wire.ReceiveMessageRequest(batch_size=asked)) == expected


@pytest.mark.parametrize(
    ("polling", "deadline_s", "expected_ms"),
    [
        (None, None, 20_000),  # Go's simple consumer without anything
        (None, 8.0, 6500),  # and with a deadline: its polling time and 3 s
        (None, 4.0, 2500),
        (seconds(20), 23.0, 20_000),  # Python, Java: the deadline leaves room
        (seconds(40), 40.0, 20_000),  # Rust: the deadline is the polling time
        (seconds(15), 15.0, 13_500),  # the same, shorter than our maximum
        (seconds(1), 1.0, 500),
        (seconds(1), 4.0, 1000),  # shorter than RocketMQ takes
        (seconds(0), 4.0, 0),
        (seconds(5), 0.1, 0),  # hardly any time left: answer at once
        (seconds(5), -1.0, 0),
        (seconds(2**62), 1e12, 20_000),  # a telemetry-like deadline of thousands of years
    ],
)
def test_a_receive_waits_as_asked_but_answers_before_the_deadline(
    polling: wire.Duration | None, deadline_s: float | None, expected_ms: int
) -> None:
    """As the clients of each language ask."""
    request = wire.ReceiveMessageRequest(long_polling_timeout=polling)
    assert validate.wait_ms(request, deadline_s) == expected_ms


def test_a_negative_polling_time_is_refused() -> None:
    """There is no reading of it that makes sense."""
    request = wire.ReceiveMessageRequest(long_polling_timeout=seconds(-1))
    assert refusal(lambda: validate.wait_ms(request, None)).rule is Rule.POLLING_TIME


def test_an_acknowledgement_has_between_one_and_1024_entries() -> None:
    """Rust panics on an answer without entries, so there must be one to answer."""
    assert refusal(lambda: validate.check_entries([])).rule is Rule.REQUEST
    assert refusal(lambda: validate.check_entries([wire.AckMessageEntry()] * 1025)).rule is Rule.REQUEST
    validate.check_entries([wire.AckMessageEntry()] * 1024)


@pytest.mark.parametrize("key", ["k", "k" * 128, "\u00fc" * 64, "order 7/\U0001f600"])
@pytest.mark.parametrize("wish", [None, "replace", "keep"])
def test_an_own_key_is_a_printable_text(key: str, wish: str | None) -> None:
    """It reaches the broker with what is to become of what waits under it."""
    made = with_properties({OWN_KEY: key} | ({ON_SAME_KEY: wish} if wish else {}))
    validate.check_message(made)
    envelope = to_envelope(made, deliver_at_ms=7)
    assert (envelope.own_key, envelope.keeps_first) == (key, wish == "keep")


def test_messages_of_a_schedule_have_no_own_key() -> None:
    """It does not wait."""
    for properties in ({OWN_KEY: "k"}, {OWN_KEY: "k", ON_SAME_KEY: "keep"}):
        made = with_properties(properties)
        assert "cannot have an own key" in refusal(lambda made=made: validate.check_recurring(made)).why  # type: ignore[misc]


@pytest.mark.parametrize("name", [*DELAY_PROPERTIES, NOT_AFTER_MS])
def test_a_schedule_alone_sets_the_time(name: str) -> None:
    """Its message has no time of its own, neither when it is sent nor until when it is of use."""
    good = message()
    validate.check_recurring(good)
    good.user_properties[name] = "1795700000000"
    error = refusal(lambda: validate.check_recurring(good))
    assert (error.rule, error.value) == (Rule.DELIVERY_TIME, name)
