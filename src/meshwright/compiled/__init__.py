"""What is read from a compiled program: collectives, their participants, memory."""
