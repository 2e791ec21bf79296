"""Metrics: counters cheap enough for hot paths, process usage, and the Prometheus registry.

Imports: ``dmq.config``, ``dmq.runtime`` and below. Interface: the registry, counters, process usage.
"""
