"""Models, tasks and settings from the user, checked and converted."""
