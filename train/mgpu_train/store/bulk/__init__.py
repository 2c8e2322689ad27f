"""Large bodies to and from S3, by processes of their own: checksums and retries, and little memory.

    engine       in the process that uses the store: hands out tasks, hears of them, starts a dead process again
    message      what the two say to each other
    child        the process that the engine knows: one line of tasks, and the connections
    connections  a forked process each, with a worker in it
    worker       one task, tried until its deadline
    wire         one connection; what goes wrong on it, in our words
    sign         AWS signature version 4

The last four import neither botocore nor pydantic: the process has to stay small.
"""
