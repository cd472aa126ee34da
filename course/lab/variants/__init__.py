"""The variants of model.CausalSelfAttention, by name."""

from course.lab.variant import Variant
from course.lab.variants.delta import DeltaRule
from course.lab.variants.forgetting import Forgetting
from course.lab.variants.mla import MLA
from course.lab.variants.small import GQA, MQA, Differential, Gate, ValueResidual, Window

VARIANTS: dict[str, type[Variant]] = {
    "mha": Variant, "gqa": GQA, "mqa": MQA, "window": Window, "gate": Gate,
    "value_residual": ValueResidual, "forgetting": Forgetting, "differential": Differential,
    "mla": MLA, "delta": DeltaRule,
}
