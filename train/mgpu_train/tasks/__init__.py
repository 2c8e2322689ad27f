"""What is trained: the contract of a task, and the tasks of the bundled trainer."""
