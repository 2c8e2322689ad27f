"""Capacity that the account has reserved: looked up, rented in, found and bought."""
