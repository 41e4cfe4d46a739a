"""Generation: what a model of tokens writes, from any decoder, on any mesh."""
