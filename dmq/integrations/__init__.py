"""Integrations of the hook and of consumers: web frameworks, task workers, processes that fork.

``environment``  settings of the hook and of consumers in environment variables
``worker_hook``  hook of processes that fork: declared at import, opened in each process separately
                 (``figures`` of all of them together)
``consumer``     function that consumes topics for a group, over the official Python client (``push_client``), with its
                 ``runners`` and its ``pages`` for probes
``django``, ``fastapi``, ``flask``, ``celery``: imported only by users of that framework, and by no module here

docs/how-to/frameworks.md documents all of them.
"""

from __future__ import annotations
