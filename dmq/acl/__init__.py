"""Who may do what: access keys, their rules, and the signature that official clients send. No transport, no protocol.

    rules      what a key may do, and by which rule             pure
    signature  the signature of a call, checked and made        pure
    file       the file of keys, read again when it changes
    guard      calls in, the key that may make them out

Its users are ``dmq.rocketmq_server.calls.access`` for the public protocol and ``dmq.admin.api.access`` for operators.
"""
