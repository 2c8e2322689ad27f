"""What makes a machine run the agent: its Python, its container. Run there, with the standard library alone."""
