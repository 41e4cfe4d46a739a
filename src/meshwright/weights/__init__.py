"""Weights of Hugging Face folders: read into sharded arrays, and written back."""
