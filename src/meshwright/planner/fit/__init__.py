"""Whether a run fits, and what is said when it does not."""
