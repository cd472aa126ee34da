"""Correctness tests for any backend: the float64 oracle, the cases and the properties."""
