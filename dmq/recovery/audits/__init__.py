"""Audits that operators start in a running daemon, and the reports of all audits.

``reports``   the newest report of a folder, read with bounds
``runs``      one audit at a time, in a process of its own
``process``   that process

Imports: ``dmq.store``, ``dmq.trail`` and below; ``spark_audit`` runs as a program. Interface: the names in
``dmq.recovery``.
"""
