"""Known regions of a program, and the faster code that replaces them."""
