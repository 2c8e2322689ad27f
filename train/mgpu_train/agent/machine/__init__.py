"""The machine around the agent: processes, notices of its end, the lease, its network and what it is made of."""
