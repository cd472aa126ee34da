"""Triton kernels. They import triton, so import them inside functions."""
