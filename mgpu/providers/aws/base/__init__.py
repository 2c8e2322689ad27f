"""The AWS half of stack `base`: what machines stand on, one module a kind. mgpu.iac gives Pulumi the other half.

Each kind is a value that says what a thing should be (`Thing`), and a keeper that asks AWS for it (`Keeper`).
"""
