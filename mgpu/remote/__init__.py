"""SSH to the nodes: connect with pinned host keys, run, copy, sync, stream, fan out. The only importer of paramiko.

    library     paramiko, imported without what is not needed of it
    targets     who is reached, and with which key pinned; the values that calls return
    wire        a socket that ends itself when the peer falls silent
    proxy       a program that carries SSH, as a socket
    connection  one handshake: dial, compare the host key, authenticate
    command     one command: argument list in; status and output out
    files       SFTP: read, write, follow, fetch
    snapshot    a folder of the operator as it is now: what sync sends
    receiver    the node's half of sync; its source is sent, and runs there with any Python 3
    node        all of that on one node
    nodeset     all nodes of a fleet
    sshconfig   the same targets for the system's ssh client

Callers import the modules: importing this package alone stays cheap.
"""
