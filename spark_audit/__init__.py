"""Audit of the exported trail: the final state of every message, and the findings that contradict the trail.

``schema``              columns of the trail, kinds of events and findings
``tables``, ``session`` reading of the trail, set-up of Spark
``rules``, ``engines``  pure rules, and the engines that run them
``jobs``, ``report``    audit runs, and their report
``explain``             history of one message, without Spark
``cli``                 command line

Imports no other package of this project: the files that `dmq.trail` exports are the whole contract.
"""

from __future__ import annotations
