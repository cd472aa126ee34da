"""FlashAttention's API on any device: signatures, layouts, defaults and in-place effects of
flash-attn 2.8 (Dao-AILab), over the backends of this package (docs/ATTENTION.md).

functions  flash_attn_func, flash_attn_varlen_func and their packed forms
cache      flash_attn_with_kvcache              rotary, bert_padding  as flash-attn's modules
arguments  what is refused, before anything is written
calls      use(), report(), and the kernel of each call
"""
