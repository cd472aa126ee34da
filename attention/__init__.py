"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from . import hf
from .autotune import fastest
from .flash_impl import use_flash_impl
from .own import is_file
from .probing import probe
from .ring import Ring
from .select import BACKENDS, RULES, announce, check_name, get, packages, resolve, select
from .spec import (
    Backend,
    BackendUnavailable,
    Caps,
    Machine,
    Partial,
    Policy,
    Refusal,
    Resolution,
    Spec,
    visible,
)

__all__ = [
    "BACKENDS",
    "RULES",
    "Backend",
    "BackendUnavailable",
    "Caps",
    "Machine",
    "Partial",
    "Policy",
    "Refusal",
    "Resolution",
    "Ring",
    "Spec",
    "announce",
    "check_name",
    "fastest",
    "get",
    "hf",
    "is_file",
    "packages",
    "probe",
    "resolve",
    "select",
    "use_flash_impl",
    "visible",
]
__version__ = "0.1.0"  # pyproject.toml reads it here

if __name__ == "attention":  # a checkout; where it is installed, the package is nanoattn
    from .alias import share

    share()
