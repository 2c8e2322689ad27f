"""A fake AWS: moto in a process of its own, with what moto lacks, and Linux machines behind its instances."""
