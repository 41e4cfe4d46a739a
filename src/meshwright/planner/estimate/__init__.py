"""What a plan needs: memory and time."""
