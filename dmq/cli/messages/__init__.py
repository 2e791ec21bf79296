"""Commands about messages: send, list, change, retry, redrive, recur, replay.

Imports: bulk, session, output. Interface: ``app`` of each module.
"""
