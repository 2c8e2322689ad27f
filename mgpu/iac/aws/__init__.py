"""The Pulumi half of what mgpu makes at AWS: one handler for all kinds, their schema, the SDK that programs import."""
