"""The RPCs of ``apache.rocketmq.v2.MessagingService`` and their answers.

Imports: calls, sessions, codec and below. Interface: the service, its parts, the health service.
"""
