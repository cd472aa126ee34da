"""FlashAttention's API over the backends of this package (docs/ATTENTION.md)."""
