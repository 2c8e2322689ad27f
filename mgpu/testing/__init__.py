"""For those who write something that mgpu uses: what it has to promise, as tests. Needs pytest."""
