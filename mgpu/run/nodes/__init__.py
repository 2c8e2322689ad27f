"""What is done on the nodes by SSH: their Python or container, the code, the agent's commands, outputs."""
