"""Base of the variants: model.py's attention layer, with its costs."""

from __future__ import annotations

from typing import Any, ClassVar

from attention import Spec
from model import GPT, CausalSelfAttention, GPTConfig


class Variant(CausalSelfAttention):
    """MHA, multi-head attention (Vaswani et al. 2017, arXiv 1706.03762)."""

    settings: ClassVar[dict[str, Any]] = {}  # fields of GPTConfig

    def __init__(self, config: GPTConfig, layer: int = 0, first: Any = None) -> None:
        """`first`: the attention of layer 0, None in that layer."""
        super().__init__(config)
        self.n_head, self.window = config.n_head, config.windows[layer]
        self.layer, self.first = layer, (first,)  # in a tuple: not this layer's weights
        self.add_weights(config)

    def add_weights(self, config: GPTConfig) -> None:
        """Add the variant's own weights."""

    def request(self, spec: Spec) -> Spec:
        """The kernel's Spec, from the config's."""
        return spec

    @property
    def cached(self) -> int:
        """Numbers cached for a token."""
        return 2 * self.kv_size

    @property
    def state(self) -> int:
        """Numbers stored for a text of any length."""
        return 0

    def products(self, keys: float) -> float:
        """Multiply-adds of a token that sees `keys`, without weights."""
        return 2 * self.q_size * keys  # q . k, and p v

    def refuse(self, *options: object) -> None:
        if any(option is not None for option in options):
            raise NotImplementedError(f"{type(self).__name__}: without segments, cache and ALiBi")


def replace_attention(model: GPT, variant: type[Variant]) -> None:
    """Each layer's kernel is chosen for its request()."""
    layers: list[Variant] = []
    for block in model.transformer.h:
        block.attn = variant(model.config, len(layers), layers[0] if layers else None)
        layers.append(block.attn)
    specs = model.config.specs
    model.plans.specs = lambda phase: [
        layer.request(spec) for layer, spec in zip(layers, specs(phase), strict=True)
    ]
