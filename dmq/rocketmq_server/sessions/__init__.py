"""Client sessions: the bounded table of clients, their settings, and per-client limits.

Imports: codec and below. Interface: sessions, settings, slots.
"""
