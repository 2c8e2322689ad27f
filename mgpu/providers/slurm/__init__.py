"""Provider `slurm`: nodes of a cluster that the user has already, asked for from its scheduler and given back."""
