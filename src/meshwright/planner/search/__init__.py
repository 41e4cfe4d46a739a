"""Which plan is best."""
