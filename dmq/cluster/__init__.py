"""In front of a cluster: what waits here goes there when it is due, and everything else is passed on."""
