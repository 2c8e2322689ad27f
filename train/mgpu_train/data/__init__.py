"""Text as samples: which bytes, and in which order."""
