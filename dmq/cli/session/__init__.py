"""Options that several commands share, and the connection they describe.

Imports: output. Interface: options, retry-policy options, directories without a daemon.
"""
