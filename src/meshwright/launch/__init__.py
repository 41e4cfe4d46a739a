"""Several processes on this machine: starting them, watching them, and joining them inside."""
