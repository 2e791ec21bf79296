"""More than one process: fronts own the clients' sockets, and one process, the store's, owns the directory.

A front speaks HTTP/2 and TLS, reads and checks the calls that come for each message, and passes on everything else as
it came. It has no state that outlives it: one that dies costs its connections, and is started again.
"""

from __future__ import annotations
