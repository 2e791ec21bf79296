"""A shop in Flask that loses no order while its broker is away.

DMQ_SPOOL=/var/lib/shop/spool SHOP_BROKER=127.0.0.1:8081 gunicorn --workers 2 flask_shop:app
"""

from __future__ import annotations

from flask import Flask, request
from shop import answer_for, hook

from dmq.integrations.flask import blueprint

app = Flask(__name__)
app.register_blueprint(blueprint(hook), url_prefix="/hook")  # /hook/metrics and /hook/ready


@app.post("/orders")
def create() -> tuple[str, int]:
    """Take an order."""
    status, text = answer_for(hook.send("order-created", request.get_data()))
    return text, status
