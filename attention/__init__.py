"""Attention: one function, many interchangeable kernels. Start with spec.py, then manual.py."""

from attention.probe import announce, probe, select
from attention.resolve import BACKENDS, RULES, BackendUnavailable, get, packages, resolve
from attention.spec import Backend, Caps, Machine, Resolution, Spec, visible

__all__ = [
    "BACKENDS",
    "RULES",
    "Backend",
    "BackendUnavailable",
    "Caps",
    "Machine",
    "Resolution",
    "Spec",
    "announce",
    "get",
    "packages",
    "probe",
    "resolve",
    "select",
    "visible",
]
