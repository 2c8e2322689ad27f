"""What names may look like. Standard library only."""

from __future__ import annotations

RUN_ID = r"^[a-z][a-z0-9-]{0,62}$"
"""A run's id, as a pattern: it is part of paths, keys and labels."""
