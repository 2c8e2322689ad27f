"""The run file as text: where each value stands, how one is changed, and how a mistake in it is said."""
