"""EC2 machines: launched as a gang, equipped, listed, torn down."""
