"""Measures Rock-DMQ: ``python -m bench``, a table and a JSON file.

Every figure is the median of several rounds, and stands beside a floor or a peer measured in the same run, round by
round in turn, because a machine's speed drifts: read ratios.

``cli``        options, progress, the order of things; ``plan`` is what it hands to the figures
``figures``    what a figure is, the table and the JSON
``place``      directories on a real disk, and what they take there
``messages``   messages as an official client sends them
``daemon``     a daemon as a process of its own, and what it says about itself
``load``       the load generator: a Go program in ``bench/load/``, or ``load_python``, which is a limit itself
``echo``       the peer: a grpcio server that does nothing
``inside``     what runs in a process of its own: enqueue, floor, burst, fill; ``child`` is its other end
``inside_nack`` ``inside_fairness``   more of it; ``cell``, ``consumer`` and ``retries`` are what they are made of
``trail_maker`` ``trail_files``   long audit trails; ``audit_peer`` is what DuckDB makes of them
``enqueue`` ``send`` ``lateness`` ``burst`` ``pending`` ``nack`` ``fairness`` ``audit``   the figures
"""

from __future__ import annotations
