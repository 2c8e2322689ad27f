"""What AWS sells: machine types, prices and quotas, shipped as a snapshot and refreshed on request."""
