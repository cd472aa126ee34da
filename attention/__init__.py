"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from attention.autotune import fastest
from attention.flash_impl import use_flash_impl
from attention.select import BACKENDS, RULES, announce, get, packages, probe, resolve, select
from attention.spec import (
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
