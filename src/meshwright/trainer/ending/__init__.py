"""When and why a run stops."""
