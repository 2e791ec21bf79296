"""Changes to many items: selection, confirmation, progress, partial failure.

Imports: session and output. Interface: confirmation, progress, bulk changes.
"""
