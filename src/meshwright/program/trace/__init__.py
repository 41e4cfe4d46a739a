"""Tracing a loss: model leaves, module scopes, casts, and the program in normal form."""
