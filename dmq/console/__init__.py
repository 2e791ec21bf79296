"""Console in the browser: pages about one daemon, served by a process of its own over ``rockdmq.admin.v1``.

``sessions``  browser sessions: the access key of a signed-in person, and the token of its forms
``access``    calls that a key allows, for the buttons of a page
``views``     figures and changes of each screen, from calls of the admin service
``shown``     texts of times, sizes and message bodies
``live``      the overview as server-sent events
``app``       routes, security headers, sign-in
``serving``   the process

Vendored scripts and their licences are in ``static/vendor``. No page loads anything from another server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports
from broker_adapter.runtime.extras import require

if TYPE_CHECKING:
    from dmq.console.serving import run

__all__ = ["run"]

require("the console", "console", "starlette", "uvicorn", "jinja2", "grpc")

__getattr__ = lazy_exports(__name__, {"dmq.console.serving": "run"})
