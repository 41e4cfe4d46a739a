"""What a process knows of itself: its heartbeat, signals, attempts, versions and caches."""
