"""Who rents out machines: one contract (`base`), one registry, one module or package a provider."""
