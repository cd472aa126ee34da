"""Variants of attention: what each costs, computed, and what it does, measured on a laptop."""
