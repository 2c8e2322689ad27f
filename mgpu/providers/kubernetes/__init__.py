"""Provider `kubernetes`: pods of a cluster that the user has already, asked for as a Job and given back."""
