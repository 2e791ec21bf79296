"""The hook and consumers where people use them: web frameworks, task workers, processes that fork.

``environment``  what the hook and consumers are told by environment variables
``worker_hook``  the hook of processes that fork: declared at import, opened by each process for itself
                 (``figures`` of all of them together)
``consumer``     a function that consumes topics for a group, over the official Python client (``push_client``); who
                 runs it (``runners``), and its ``pages`` for probes
``django``, ``fastapi``, ``flask``, ``celery``: each is imported by those who have that framework, and by nobody here

docs/INTEGRATIONS.md is the page of all of them.
"""

from __future__ import annotations
