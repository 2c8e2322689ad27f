"""Side-by-side measurements; run by `make bench`. Nothing here is a test: these figures depend on the machine."""
