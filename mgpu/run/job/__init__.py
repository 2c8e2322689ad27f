"""What a run asks for: its request, image, store credentials, and the stack output that it runs on."""
