"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

import importlib.util
import os
import sys

from . import hf
from .caps import Backend, BackendUnavailable, Caps, DeviceLost, Partial, Refusal
from .compat import as_flash_attn, bert_padding
from .compat.calls import report, use
from .compat.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .names import BACKENDS, RULES, check_name, get, is_code, packages, register
from .plan import Call, Phase, Plan, Plans, fastest
from .proof import probe
from .ring import Ring
from .select import Ranks, Resolution, announce, resolve, select
from .spec import Machine, Policy, Spec, visible
from .truth import weights

__all__ = [
    "BACKENDS", "RULES", "Backend", "BackendUnavailable", "Call", "Caps", "DeviceLost",
    "Machine", "Partial", "Phase", "Plan", "Plans", "Policy", "Ranks", "Refusal", "Resolution",
    "Ring", "Spec", "announce", "as_flash_attn", "bert_padding", "check_name", "fastest",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "get", "hf", "is_code",
    "packages", "probe", "register", "report", "resolve", "select", "use", "visible", "weights",
]
__version__ = "0.3.0"  # pyproject.toml reads it here

# Installed as nanoattn; in a checkout both names are one package: operators register once.
if __name__ == "attention" and "nanoattn" in sys.modules:
    raise ImportError(f"nanoattn is another package: {sys.modules['nanoattn'].__file__}")
_spec = importlib.util.find_spec("attention")
sys.modules[f"{__name__}.bert_padding"] = bert_padding
if _spec and _spec.origin and os.path.samefile(_spec.origin, __file__):
    _other = "nanoattn" if __name__ == "attention" else "attention"
    for _name in [n for n in sys.modules if n.partition(".")[0] == __name__]:
        sys.modules[_other + _name.removeprefix(__name__)] = sys.modules[_name]
