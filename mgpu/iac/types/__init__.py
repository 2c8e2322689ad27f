"""The resource types of the plug-in that every provider shares: Fleet, FleetGuard, Image, SshKey."""
