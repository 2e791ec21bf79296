"""A trace as a person reads it: the tree of its spans, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dmq.tracing import MessageSpan

GROUP, ATTEMPT = "messaging.consumer.group.name", "rockdmq.delivery.attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpan:
    """One span, by whichever program it was made."""

    name: str
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    links: Sequence[int] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """Name, group and attempt."""
        about = [str(self.attributes[GROUP])] if GROUP in self.attributes else []
        about += [f"attempt {self.attributes[ATTEMPT]}"] if ATTEMPT in self.attributes else []
        return f"{self.name} ({', '.join(about)})" if about else self.name


def of_daemon(span: MessageSpan) -> TreeSpan:
    """Return a span as the daemon emits it."""
    return TreeSpan(
        name=span.name,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        start_ns=span.start_ms * 1_000_000,
        end_ns=span.end_ms * 1_000_000,
        attributes=span.attributes,
        links=span.links,
        error=span.error,
    )


def tree_of(spans: Sequence[TreeSpan]) -> str:
    """Return the tree of the spans of one trace, in the order of their ends; links and errors follow the names."""
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans), "two spans have one id"

    def lines(parent_id: int, indent: str) -> Iterator[str]:
        children = [span for span in spans if span.parent_id == parent_id]
        children.sort(key=lambda span: (span.end_ns, span.start_ns))
        for span in children:
            is_last = span is children[-1]
            yield f"{indent}{'└── ' if is_last else '├── '}{_line(span, known)}"
            yield from lines(span.span_id, indent + ("    " if is_last else "│   "))

    roots = [span for span in spans if span.parent_id not in known]
    texts = []
    for root in roots:
        texts += [_line(root, known), *lines(root.span_id, "")]
    return "\n".join(texts)


def _line(span: TreeSpan, known: Mapping[int, TreeSpan]) -> str:
    text = span.label
    if span.error:
        text += f"  ERROR {span.error}"
    for link in span.links:
        text += f"  -> {known[link].label}"
    return text
