"""The hook in Flask: ``app.register_blueprint(blueprint(hook), url_prefix="/hook")``."""

from __future__ import annotations

from flask import Blueprint, Response

from dmq.integrations.worker_hook import JSON, PROMETHEUS, WorkerHook


def blueprint(hook: WorkerHook) -> Blueprint:
    """Return the routes ``/metrics`` and ``/ready``. Each process starts the hook at its first request to any route."""
    made = Blueprint("dmq_hook", __name__)
    made.before_app_request(hook.begin)

    @made.get("/metrics")
    def metrics() -> Response:
        return Response(hook.render_prometheus(), content_type=PROMETHEUS)

    @made.get("/ready")
    def ready() -> Response:
        is_ready, text = hook.readiness()
        return Response(text, 200 if is_ready else 503, content_type=JSON)

    return made
