"""What is left of a run: its result, its model, an export."""
