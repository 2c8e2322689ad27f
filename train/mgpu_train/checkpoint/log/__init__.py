"""The commit log of a run: its keys in the store, its documents, how it is read and written."""
