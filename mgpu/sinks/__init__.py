"""Who hears a run's events besides the console. A sink that raises, hangs or is slow ends and delays no run."""
