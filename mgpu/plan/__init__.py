"""Decide first as a value: requirements, offers and the plan that ranks them. Pure: no I/O."""
