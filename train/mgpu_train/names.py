"""Names that both sides have to agree on. Standard library only."""

from __future__ import annotations

RUN_ID = r"^[a-z][a-z0-9-]{0,62}$"
"""A run's id, as a pattern: it is part of paths, keys and labels."""

FAILURE_FILE = "MGPU_FAILURE_FILE"
"""The variable that tells a launcher where to leave which rank failed first, and how."""

PREFLIGHT = "MGPU_PREFLIGHT"
"""The variable that tells a launcher where the nodes meet to measure what they can do (`health.processors.Meeting`)."""

TRIALS = "trials.json"
"""What became of each trial, in the folder that the launcher is started in."""
