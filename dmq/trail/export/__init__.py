"""From the audit outbox to trail files: export, recovery after a kill, retention, verification.

Imports: ``dmq.trail`` and below. Interface: the exporter, its values, recovery, readers of a trail.
"""
