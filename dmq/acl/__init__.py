"""Access control: access keys, their rules, and the signature of official clients. Independent of transport and
protocol.

    rules      permissions of a key, and the rule for each      pure
    signature  parsing of a call's signature                    pure
    file       the file of keys, reloaded when it changes
    guard      authenticates and authorizes calls

Used by ``dmq.rocketmq_server.calls.access`` for the public protocol and by ``dmq.admin.api.access`` for operators.
"""
