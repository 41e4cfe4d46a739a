"""How a compiler would run a program: its kernels, their memory and their times."""
