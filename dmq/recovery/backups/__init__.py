"""Periodic backups and snapshots of a running daemon.

Imports: ``dmq.store``, ``dmq.trail`` and below. Interface: the backup folder, snapshots.
"""
