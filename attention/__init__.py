"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from attention.autotune import fastest
from attention.probe import announce, probe, select
from attention.resolve import BACKENDS, RULES, get, packages, resolve
from attention.sdpa import use_flash_impl
from attention.spec import (
    Backend,
    BackendUnavailable,
    Caps,
    Machine,
    Policy,
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
    "Policy",
    "Resolution",
    "Spec",
    "announce",
    "fastest",
    "get",
    "packages",
    "probe",
    "resolve",
    "select",
    "use_flash_impl",
    "visible",
]
