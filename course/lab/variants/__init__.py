"""The variants: a file each, with a class that can replace model.CausalSelfAttention."""

NAMES = ("mha", "gqa", "mqa", "window", "gate", "value_residual", "forgetting", "differential",
         "mla", "delta")
