"""Java for tests: options of the virtual machine, and own programs on the classic client of RocketMQ.

Imports: no package.
"""
