"""A shop in Django that loses no order while its broker is away.

DMQ_SPOOL=/var/lib/shop/spool SHOP_BROKER=127.0.0.1:8081 gunicorn --workers 2 django_shop:application
"""

from __future__ import annotations

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt
from shop import answer_for, hook

from dmq.integrations.django import urls

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1"], SECRET_KEY="of an example")


@csrf_exempt
def create(request: HttpRequest) -> HttpResponse:
    """Take an order. Inside a transaction: `transaction.on_commit(lambda: hook.send(...))`."""
    status, text = answer_for(hook.send("order-created", request.body))
    return HttpResponse(text, status=status)


urlpatterns = [
    path("orders", create),
    path("hook/", include(urls(hook))),  # /hook/metrics and /hook/ready
]
application = get_wsgi_application()
