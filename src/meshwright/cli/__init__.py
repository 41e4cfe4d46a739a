"""The words a person types: one module per command."""
