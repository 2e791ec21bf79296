"""Export of the audit outbox to trail files: exporter, recovery after a kill, retention, verification.

Imports: ``dmq.trail`` and below. Interface: the exporter, its values, recovery, readers of a trail.
"""
