"""Estimates for GPUs that are not here: memory, time and bytes sent per step."""
