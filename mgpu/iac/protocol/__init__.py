"""Pulumi's provider protocol: gRPC on one side, handlers of resource types on the other."""
