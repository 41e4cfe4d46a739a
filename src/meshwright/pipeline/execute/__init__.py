"""The single program that runs all pipeline stages, tick by tick."""
