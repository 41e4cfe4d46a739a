"""Tracing a loss: the model as leaves, module scopes, casts, and the program in normal form."""
