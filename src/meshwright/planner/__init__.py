"""Plans: what they need, what a machine can do, and which one is best for some hardware."""
