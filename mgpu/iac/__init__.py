"""The Pulumi side: the engine and its set-up, the resource provider, the resources, and the stack output."""
