"""Data as samples: which ones, in which order, and how they come beside training."""
