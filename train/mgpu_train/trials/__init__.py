"""Short trainings in fresh processes: where a run breaks, and with which settings it is fastest."""
