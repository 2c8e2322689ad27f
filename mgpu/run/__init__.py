"""One run from request to nothing left: record, launch, supervise, teardown."""
