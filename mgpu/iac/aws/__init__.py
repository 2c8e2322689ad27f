"""The Pulumi half of stack `base`: one handler for all its kinds, their schema, and the SDK that a program imports."""
