"""This machine: its GPUs, versions, and which backend is fastest on it."""
