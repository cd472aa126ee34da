"""GQA, grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

from typing import ClassVar

from course.lab.variant import Variant


class Attention(Variant):
    """Two query heads share a key/value head."""

    settings: ClassVar = {"n_kv_head": 2}  # of 4 heads
