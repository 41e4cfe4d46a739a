"""What happens before the first step: arguments, checks, the folder, initial weights."""
