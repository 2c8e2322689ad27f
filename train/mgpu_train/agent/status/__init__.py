"""What the agent says of an attempt: the status file, the log, the metrics that it reads."""
