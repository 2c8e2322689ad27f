"""The AWS half of what calls `mgpu reconcile` in an account: a schedule, and the Fargate task that it starts."""
