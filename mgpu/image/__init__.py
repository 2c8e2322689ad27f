"""The training image: what it is built of, built, pushed, and whether a machine can run it. The only user of Docker."""
