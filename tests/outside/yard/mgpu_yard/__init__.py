"""Provider `yard`: a cloud that is not mgpu's, from an entry point to eight calls (docs/provider.md)."""
