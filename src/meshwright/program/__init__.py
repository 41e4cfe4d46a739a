"""The traced model (module paths, dim classes, passes) and the compiled one (ledger, memory)."""
