"""A task and a strategy that are not mgpu's: what a package has to bring to be trained by its trainer."""
