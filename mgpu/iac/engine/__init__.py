"""The Pulumi engine: installed, driven, its locks, its state, its projects."""
