"""What a user writes: the run file, as a typed `RunSpec`; every mistake in it is reported at once."""
