"""The traced loss on a mesh: gathered weights, sharding constraints, rematerialized blocks."""
