"""Opaque texts for clients: receipt handles, recall handles, transaction ids.

Imports: ``dmq.store`` and below. Interface: encode and decode functions of each handle.
"""
