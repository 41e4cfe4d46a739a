"""Plans: what they need, how fast they are, and which one is best for some hardware."""
