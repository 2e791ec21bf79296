"""Verdicts on the errors that handlers raise, and the classifier that gives them by default.

Imports: nothing of ours. Interface: the verdicts, the default classifier, the text of an error.
"""

from __future__ import annotations

from retry.hook.verdicts.classifier import Classifier, classify, describe, hides_attempts, judge, passed
from retry.hook.verdicts.verdict import Permanent, Retry, Throttled, Unknown, Unreadable, Verdict

__all__ = [
    "Classifier",
    "Permanent",
    "Retry",
    "Throttled",
    "Unknown",
    "Unreadable",
    "Verdict",
    "classify",
    "describe",
    "hides_attempts",
    "judge",
    "passed",
]
