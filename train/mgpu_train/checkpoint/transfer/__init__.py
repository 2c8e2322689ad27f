"""A checkpoint's files to the store and back, and whether they are what they should be."""
