"""Variants of attention: computed costs, measured results."""
