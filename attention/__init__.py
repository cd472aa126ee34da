"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from . import hf
from .autotune import fastest
from .flash_impl import use_flash_impl
from .select import BACKENDS, RULES, announce, get, packages, probe, resolve, select
from .spec import (
    Backend,
    BackendUnavailable,
    Caps,
    Machine,
    Policy,
    Refusal,
    Resolution,
    Spec,
    visible,
)
