"""`python -m mgpu`."""

from mgpu.cli import main

if __name__ == "__main__":
    main()
