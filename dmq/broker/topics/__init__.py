"""Topics and consumer groups: their names, numeric ids and settings.

Imports: ``dmq.broker.io``, ``dmq.store`` and below. Interface: the registry, the catalog, topic settings.
"""
