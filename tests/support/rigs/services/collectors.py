"""Receivers of spans in a process of their own: a real OpenTelemetry collector, and a small one without the SDK.

Both write each request as a line of JSON to a file, in the JSON of OTLP.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.clients.official.builds import OTELCOL, what_is_missing
from support.effort import EFFORT
from support.models.runs.span_tree import TreeSpan
from support.rigs.daemon.process import free_port

PATIENCE_S = 60.0
_SMALL = """
import json, sys
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, HTTPServer
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = MessageToDict(ExportTraceServiceRequest.FromString(body))
        for spans in (s for r in request["resourceSpans"] for s in r["scopeSpans"]):
            for span in spans["spans"]:
                for part in (span, *span.get("links", ())):
                    part.update({key: b64decode(part[key]).hex() for key in part if key.endswith("Id")})
        is_found = self.path == "/v1/traces"
        if is_found:
            with open(sys.argv[2], "a") as out:
                out.write(json.dumps(request) + "\\n")
        self.send_response(200 if is_found else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
"""
_KINDS = {2: "SPAN_KIND_SERVER", 1: "SPAN_KIND_INTERNAL", 3: "SPAN_KIND_CLIENT", 4: "SPAN_KIND_PRODUCER"}


class Collector:
    """A process that receives spans at ``endpoint``. A context manager: leaving it ends the process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self._file = folder / "spans.json"
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """URL for ``otel_endpoint``."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process, and wait until it accepts connections."""
        self._process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, env=os.environ)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                assert self._process.poll() is None
                assert time.monotonic() < until_s
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests so far."""
        if not self._file.exists():
            return []
        whole = self._file.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line]

    def raw_spans(self) -> list[dict[str, Any]]:
        """Return the received spans so far, in the JSON of OTLP."""
        return [
            span
            for request in self.requests()
            for resource in request["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def wait(self, is_so: Callable[[Sequence[TreeSpan]], bool]) -> list[TreeSpan]:
        """Return the received spans once they are as expected."""
        until_s = time.monotonic() + PATIENCE_S
        while not is_so(found := [_tree_span(each) for each in self.raw_spans()]):
            assert time.monotonic() < until_s, [span.label for span in found]
            time.sleep(0.05)
        return found

    def _command(self) -> Sequence[str | Path]:
        return (sys.executable, "-c", _SMALL, str(self.port), self._file)


class RealCollector(Collector):
    """An OpenTelemetry collector with a receiver of OTLP and an exporter to a file."""

    def _command(self) -> Sequence[str | Path]:
        config = self._file.with_name("collector.yaml")
        config.write_text(
            f"""
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{self.port}"}}}}}}}}
exporters: {{file: {{path: "{self._file}", flush_interval: 50ms}}}}
service:
  telemetry: {{logs: {{level: error}}, metrics: {{level: none}}}}
  pipelines: {{traces: {{receivers: [otlp], exporters: [file]}}}}
""",
            encoding="utf-8",
        )
        return (OTELCOL.cache / "collector", f"--config=file:{config}")


def collector_in(folder: Path) -> Collector:
    """Return a real collector, or the small receiver: in a short run, since a build takes minutes, and without Go."""
    return Collector(folder) if EFFORT == 1 or what_is_missing(OTELCOL) else RealCollector(folder)


def _tree_span(raw: dict[str, Any]) -> TreeSpan:
    return TreeSpan(
        name=raw["name"],
        span_id=int(raw["spanId"], 16),
        parent_id=int(raw.get("parentSpanId") or "0", 16),
        start_ns=int(raw["startTimeUnixNano"]),
        end_ns=int(raw["endTimeUnixNano"]),
        attributes=attributes_of(raw),
        links=[int(link["spanId"], 16) for link in raw.get("links", ())],
        error=raw.get("status", {}).get("message", ""),
    )


def attributes_of(raw: dict[str, Any]) -> dict[str, str | int]:
    """Return the attributes of a span or a resource."""
    found: dict[str, str | int] = {}
    for each in raw.get("attributes", ()):
        value = each["value"]
        found[each["key"]] = int(value["intValue"]) if "intValue" in value else value.get("stringValue", "")
    return found


def kind_of(raw: dict[str, Any]) -> str:
    """Return the kind of a span by its name, which JSON may give as a number."""
    return _KINDS.get(raw["kind"], str(raw["kind"]))
