"""Commands about a daemon and its store: serve, configure, watch, back up, demonstrate.

Imports: bulk, session, output. Interface: ``app`` of each module.
"""
