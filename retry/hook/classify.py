"""What the errors mean that handlers raise, without importing the libraries they come from.

The defaults, first match wins:

    a Verdict                                   itself
    has ``code().name``, as gRPC's errors       by that name, see ``_by_status``
    refused connection, no route, no name       Retry
    reset, broken or aborted connection         Retry, uncertain
    TimeoutError, or a class named ...Timeout   Retry, uncertain
    ConnectionError, OSError                    Retry
    anything else                               Unknown, uncertain
"""

from __future__ import annotations

from collections.abc import Callable

from retry.hook.verdict import Permanent, Retry, Throttled, Unknown, Verdict

Classifier = Callable[[BaseException], "Verdict | type[Verdict] | None"]

THROTTLED_AFTER_S = 1.0  # when the destination names no time
ERROR_CHARS_MAX = 300

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
    except Exception as broken:  # noqa: BLE001 - a user's code; the message must not be lost for it
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
    except Exception:  # noqa: BLE001 - not what it looked like
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
