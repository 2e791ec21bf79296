"""What the errors mean that handlers raise, without importing the libraries they come from.

The defaults, first match wins:

    a Verdict                                   itself
    has ``code().name``, as gRPC's errors       by that name, see ``_by_status``
    refused connection, no route, no name       Retry
    reset, broken or aborted connection         Retry, uncertain
    TimeoutError, or a class named ...Timeout   Retry, uncertain
    ConnectionError, OSError                    Retry
    anything else                               Unknown, uncertain

An error is certain only where it proves that no attempt got through. It does not if an earlier attempt is in its
context and was in doubt, nor if it comes from a client that makes several attempts and raises the last one's error.
"""

from __future__ import annotations

from collections.abc import Callable

from retry.hook.verdict import Permanent, Retry, Throttled, Unknown, Verdict

Classifier = Callable[[BaseException], "Verdict | type[Verdict] | None"]

THROTTLED_AFTER_S = 1.0  # when the destination names no time
ERROR_CHARS_MAX = 300
_EARLIER_MAX = 32
# A function of the official RocketMQ client, as it stands in the traceback of an attempt's error: each attempt of its
# ``send_async`` ends in a callback of its own, and only the last one is told.
_ASYNC_ATTEMPT = "__handle_send_response_async"

# Status names of gRPC. What is wrong with the caller's rights or with the destination is no property of one message:
# an expired certificate must not bury a whole spool, so those are repeated.
_GRPC_PERMANENT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE"})
_GRPC_RETRY = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"})
# Also said of a connection that broke after the request had left on it; only these texts say that there was none.
_GRPC_UNAVAILABLE = "UNAVAILABLE"
_GRPC_NOT_CONNECTED = ("failed to connect", "resolution failed")
_GRPC_UNCERTAIN = frozenset({"DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL"})
_GRPC_THROTTLED = "RESOURCE_EXHAUSTED"


def classify(error: BaseException) -> Verdict:
    """Return what ``error`` means by the defaults above. Never raises."""
    if isinstance(error, Verdict):
        return error
    verdict = _verdict(error)
    if not verdict.is_uncertain and hides_attempts(error, _is_in_doubt):
        verdict.is_uncertain = True
    return verdict


def hides_attempts(error: BaseException, is_in_doubt: Callable[[BaseException], bool]) -> bool:
    """Return True if an attempt before the one that raised ``error`` may have got through, or is not known."""
    chain = [error, *_earlier(error)]
    return any(passed(each, _ASYNC_ATTEMPT) for each in chain) or any(map(is_in_doubt, chain[1:]))


def passed(error: BaseException, function: str) -> bool:
    """Return True if ``error`` went through a function of that name."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            return True
        trace = trace.tb_next
    return False


def _earlier(error: BaseException) -> list[BaseException]:
    """Return the errors that were being handled, or are the cause, when ``error`` was raised; not without end."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting and len(found) < _EARLIER_MAX:
        last = waiting.pop()
        for each in (last.__cause__, last.__context__):
            if each is not None and not any(each is one for one in (error, *found)):
                found.append(each)
                waiting.append(each)
    return found


def _is_in_doubt(earlier: BaseException) -> bool:
    verdict = _verdict(earlier)
    # What nobody knows may be no attempt at all: an application looks things up before it sends.
    return verdict.is_uncertain and isinstance(verdict, Retry)


def _verdict(error: BaseException) -> Verdict:
    """Return what ``error`` means, but for earlier attempts."""
    if isinstance(error, Verdict):
        return error
    text = describe(error)
    if (name := _status_name(error)) is not None:
        return _by_status(name, text)
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return Retry(text, is_uncertain=True)
    if isinstance(error, TimeoutError) or _is_named_timeout(error):
        return Retry(text, is_uncertain=True)
    if isinstance(error, OSError):  # ConnectionError is one
        return Retry(text)
    return Unknown(text)


def judge(classifier: Classifier | None, error: BaseException) -> tuple[Verdict, Exception | None]:
    """Ask ``classifier``, then the defaults; also return what the classifier raised, if it did.

    ``None`` from a classifier means that it leaves the error to the defaults. One that raises, or returns something
    else, makes the error ``Unknown``. A verdict that the handler raised is not put to the classifier.
    """
    if classifier is None or isinstance(error, Verdict):
        return classify(error), None
    try:
        verdict = classifier(error)
        if verdict is None:
            return classify(error), None
        if isinstance(verdict, type) and issubclass(verdict, Verdict):
            verdict = verdict(describe(error))
        if not isinstance(verdict, Verdict):
            raise TypeError(f"a classifier returned {verdict!r:.60}, one of Retry, Permanent, Throttled, Unknown")
    except Exception as broken:  # noqa: BLE001 - user code; must not lose the message
        return Unknown(describe(error)), broken
    return verdict, None


def describe(error: BaseException) -> str:
    """Return class and text of ``error`` on one short line. Never raises."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a user's __str__
        text = "(its text cannot be read)"
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:ERROR_CHARS_MAX]


def _status_name(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    if not callable(code):
        return None
    try:
        name = code().name
    except Exception:  # noqa: BLE001 - not a gRPC error after all
        return None
    return name if isinstance(name, str) else None


def _by_status(name: str, text: str) -> Verdict:
    if name in _GRPC_PERMANENT:
        return Permanent(text)
    if name == _GRPC_THROTTLED:
        return Throttled(text, after_s=THROTTLED_AFTER_S)
    if name == _GRPC_UNAVAILABLE:
        return Retry(text, is_uncertain=not any(words in text.lower() for words in _GRPC_NOT_CONNECTED))
    if name in _GRPC_RETRY:
        return Retry(text)
    if name in _GRPC_UNCERTAIN:
        return Retry(text, is_uncertain=True)
    return Unknown(text)


def _is_named_timeout(error: BaseException) -> bool:
    # requests, urllib3, kafka and pika have timeouts that are no TimeoutError
    return any(parent.__name__.endswith(("Timeout", "TimeoutError")) for parent in type(error).__mro__)
