"""The phases of an attempt in order: prepare, resume, launch and watch, drain."""
