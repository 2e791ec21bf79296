"""Spark jobs that read the exported audit trail and say, message by message, what became of it.

Will hold the trail's schemas (`schema`), reading and session set-up (`tables`, `session`), pure transforms
(`transforms`), the reports built from them (`report`), the jobs that join these (`jobs`) and a command line (`cli`).
Imports nothing of ours: the files that `dmq.trail` exports are the whole contract.
"""

from __future__ import annotations
