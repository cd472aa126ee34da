"""MQA, multi-query attention (Shazeer 2019, arXiv 1911.02150)."""

from typing import ClassVar

from course.lab.variant import Variant


class Attention(Variant):
    """All query heads share one key/value head."""

    settings: ClassVar = {"n_kv_head": 1}
