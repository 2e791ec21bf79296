"""The hook in Django: ``path("hook/", include(urls(hook)))``."""

from __future__ import annotations

from django.core.signals import request_started
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from dmq.integrations.worker_hook import JSON, PROMETHEUS, WorkerHook


def urls(hook: WorkerHook) -> list[URLPattern]:
    """Return the routes ``metrics`` and ``ready``. Each process starts the hook at its first request to any route."""

    def metrics(_: HttpRequest) -> HttpResponse:
        return HttpResponse(hook.render_prometheus(), content_type=PROMETHEUS)

    def ready(_: HttpRequest) -> HttpResponse:
        is_ready, text = hook.readiness()
        return HttpResponse(text, status=200 if is_ready else 503, content_type=JSON)

    request_started.connect(hook.begin, weak=False, dispatch_uid=f"dmq-hook-{id(hook)}")
    return [path("metrics", metrics), path("ready", ready)]
