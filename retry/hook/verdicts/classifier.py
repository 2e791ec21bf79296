"""Verdicts on the errors that handlers raise, without importing the libraries that define them.

The defaults, first match wins:

    a Verdict                                   itself
    has ``code().name``, as gRPC's errors       by that name, see ``_by_status``
    reset, broken or aborted connection         Retry, uncertain
    TimeoutError, or a class named ...Timeout   Retry, uncertain
    other ConnectionError or OSError            Retry (refused connection, no route, unknown host)
    anything else                               Unknown, uncertain

An error is certain only if it proves that no attempt succeeded. It does not prove that if an earlier attempt in its
context was in doubt. Nor does it if its client makes several attempts and raises only the error of the last one.
"""

from __future__ import annotations

from collections.abc import Callable

from retry.hook.verdicts.verdict import Permanent, Retry, Throttled, Unknown, Verdict

Classifier = Callable[[BaseException], "Verdict | type[Verdict] | None"]

THROTTLED_AFTER_S = 1.0  # if the destination specifies no time
ERROR_CHARS_MAX = 300
_EARLIER_MAX = 32
# A function of the official RocketMQ client, as named in the traceback of an attempt's error. Each attempt of its
# ``send_async`` ends in its own callback, and only the last error is reported.
_ASYNC_ATTEMPT = "__handle_send_response_async"

# Status names of gRPC. An error in the caller's permissions or at the destination is not a property of one message.
# Those errors are retried, so that an expired certificate does not move a whole spool to the dead set.
_GRPC_PERMANENT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE"})
_GRPC_RETRY = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"})
# Also the status of a connection that broke after the request was sent; only these texts prove that there was none.
_GRPC_UNAVAILABLE = "UNAVAILABLE"
_GRPC_NOT_CONNECTED = ("failed to connect", "resolution failed")
_GRPC_UNCERTAIN = frozenset({"DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL"})
_GRPC_THROTTLED = "RESOURCE_EXHAUSTED"


def classify(error: BaseException) -> Verdict:
    """Return the verdict on ``error`` by the defaults above. Never raises."""
    if isinstance(error, Verdict):
        return error
    verdict = _verdict(error)
    if not verdict.is_uncertain and hides_attempts(error, _is_in_doubt):
        verdict.is_uncertain = True
    return verdict


def hides_attempts(error: BaseException, is_in_doubt: Callable[[BaseException], bool]) -> bool:
    """Return True if an attempt before the one that raised ``error`` may have succeeded, or is unknown."""
    chain = [error, *_earlier(error)]
    return any(passed(each, _ASYNC_ATTEMPT) for each in chain) or any(map(is_in_doubt, chain[1:]))


def passed(error: BaseException, function: str) -> bool:
    """Return True if the traceback of ``error`` contains a function of that name."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            return True
        trace = trace.tb_next
    return False


def _earlier(error: BaseException) -> list[BaseException]:
    """Return the causes and contexts of ``error``, at most ``_EARLIER_MAX``."""
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
    # An unknown error may come from another step: an application may, for example, read data before it sends.
    return verdict.is_uncertain and isinstance(verdict, Retry)


def _verdict(error: BaseException) -> Verdict:
    """Return the verdict on ``error``, ignoring earlier attempts."""
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
    """Return the verdict of ``classifier``, else of the defaults; also return an error raised by the classifier.

    A classifier that returns ``None`` leaves the error to the defaults. If it raises or returns another value, the
    verdict is ``Unknown``. A verdict raised by the handler is not passed to the classifier.
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
    """Return class and text of ``error`` on one line of at most ``ERROR_CHARS_MAX`` characters. Never raises."""
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
    # timeouts of requests, urllib3, kafka and pika are not subclasses of TimeoutError
    return any(parent.__name__.endswith(("Timeout", "TimeoutError")) for parent in type(error).__mro__)
