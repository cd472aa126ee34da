"""MHA, multi-head attention (Vaswani et al. 2017, arXiv 1706.03762)."""

from course.lab.variant import Variant as Attention  # noqa: F401
