"""Several processes on this machine: starting, supervising and connecting them."""
