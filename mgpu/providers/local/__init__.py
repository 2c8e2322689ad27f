"""Provider `local`: nodes that are processes of this machine, reached by SSH only, priced and billed as if rented."""
