"""Half messages, from acceptance to commit, rollback or the last check.

Imports: sending, topics and below. Interface: transactions and their checks.
"""

from __future__ import annotations

from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP, CheckOptions, Checks
from dmq.broker.transactions.transactions import Transactions

__all__ = ["GIVEN_UP_GROUP", "CheckOptions", "Checks", "Transactions"]
