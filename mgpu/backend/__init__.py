"""Where the state of stacks lies, and beside it what mgpu keeps of runs."""
