"""Watches an attempt that trains: nodes and provider are asked, their health is judged, limits are kept."""
