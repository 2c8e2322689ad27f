"""A provider that is not mgpu's: what a package has to bring to be one."""
