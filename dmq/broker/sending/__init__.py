"""Accepting messages: from the envelope of a send to operations for the writer and the receipt.

Imports: topics, limits and below. Interface: sends and placement.
"""
