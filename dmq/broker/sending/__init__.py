"""Accepting messages: from the envelope of a send to operations for the writer and the receipt.

Imports: topics, limits and below. Interface: sends and placement.
"""

from __future__ import annotations

from dmq.broker.sending.placement import Placement, body_of, message_group_of, wrong_type
from dmq.broker.sending.sends import Note, Sends, failure_of

__all__ = ["Note", "Placement", "Sends", "body_of", "failure_of", "message_group_of", "wrong_type"]
