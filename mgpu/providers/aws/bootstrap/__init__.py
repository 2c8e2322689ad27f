"""The AWS half of stack `base`: what machines stand on, one module a kind. mgpu.iac gives Pulumi the other half.

Each kind is a value that says what a resource should be (`Resource`), and a manager that asks AWS for it (`Manager`).
"""
