"""Measures Rock-DMQ: ``python -m bench``, a table, a JSON file, and a page with pictures.

Every figure is the median of several rounds, and stands beside a floor or a peer measured in the same run, round by
round in turn, because a machine's speed drifts: read ratios.

``cli``        options, progress, the order of things; ``plan`` is what it hands to the figures
``figures``    what a figure is, and the table
``kept``       the JSON: figures of several runs on one machine
``report`` ``page`` ``pictures`` ``svg``   the page that is made of it, without measuring
``place``      directories on a real disk, and what they take there
``messages``   messages as an official client sends them
``daemon``     a daemon as a process of its own, and what it says about itself
``load``       the load generator: a Go program in ``bench/load/``, or ``load_python``, which is a limit itself
``echo`` ``echo_http2``   floors: servers that do nothing, on grpcio and on our transport
``rocketmq``   the peer: Apache RocketMQ, with ``--peer``
``inside``     what runs in a process of its own: enqueue, floor, burst, fill; ``child`` is its other end
``inside_receive`` ``inside_costs`` ``inside_indexing`` ``inside_nack`` ``inside_fairness`` ``inside_neighbours``
               ``inside_hook`` ``inside_spool`` ``inside_replica``   more of it, made of ``cell``, ``consumer``
               and ``retries``
``cluster`` ``cluster_away`` ``queue_clients``   figures with ``--peer``; ``queue_client`` is a client that is measured,
               ``QueueClient.java`` the same with Apache's
``trail_maker`` ``trail_files``   long audit trails; ``audit_peer`` is what DuckDB makes of them
``enqueue`` ``send`` ``receive`` ``lateness`` ``wakeup`` ``burst`` ``overload`` ``costs`` ``pending`` ``sizes``
               ``indexing``   the figures of the page; ``nack`` ``fairness`` ``neighbours`` ``hook`` ``audit``
               ``replica``   those measured by name, or with --all
``object_server``   an object store whose puts take a given time, for ``replica``
"""

from __future__ import annotations
