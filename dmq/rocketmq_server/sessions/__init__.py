"""Client sessions: the bounded table of clients, their settings, and what each may hold open.

Imports: codec and below. Interface: sessions, settings, slots.
"""
