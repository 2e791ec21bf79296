"""A broker in front of a cluster: stores delayed messages until they are due, and relays all other calls."""
