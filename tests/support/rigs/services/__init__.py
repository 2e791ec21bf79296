"""Programs that a daemon works with: object store, collector of spans, Prometheus, webhooks, and a browser.

Imports: ``rigs.daemon``, ``clients.official``, ``models.runs``.
"""
