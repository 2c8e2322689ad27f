"""One attempt on one node: what its phases share, and what is decided about it from plain values."""
