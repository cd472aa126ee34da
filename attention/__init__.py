"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from .autotune import fastest
from .flash_impl import use_flash_impl
from .own import is_file
from .select import BACKENDS, RULES, announce, check_name, get, packages, probe, resolve, select
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
