"""Plans: what a machine can do, and what a model needs of it."""
