import warnings

warnings.warn("deprecated", stacklevel=1)
print("done")
