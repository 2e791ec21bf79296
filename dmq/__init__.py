"""Rock-DMQ: a delay and retry service for message queues that loses nothing and can prove it.

Importing this package is cheap: it loads neither gRPC nor RocksDB nor pydantic.
"""
