"""Faster matrix products on CPUs: oneDNN, bfloat16, int8."""
