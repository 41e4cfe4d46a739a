"""The traced loss on a mesh: gathered weights, pinned activations, rematerialized blocks."""
