"""Audit of the exported trail: the final state of every message, and the findings that contradict the trail.

Holds the schemas of the trail (`schema`), its reading and the session set-up (`tables`, `session`), pure rules
(`rules`), engines that run them (`engines`), the report (`report`), the jobs that join these (`jobs`) and the command
line (`cli`). Imports no other package of this project: the files that `dmq.trail` exports are the whole contract.
"""

from __future__ import annotations
