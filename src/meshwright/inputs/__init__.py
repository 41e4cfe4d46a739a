"""What a user hands over: a model in any of its forms, and settings to check."""
