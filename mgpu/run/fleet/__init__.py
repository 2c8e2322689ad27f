"""A fleet as mgpu sees it from outside: its stack, the inventory of all machines, teardown."""
