"""--sdpa_flash_impl: since torch 2.11 FlashAttention-3 or -4 can be PyTorch's flash kernel on CUDA.

They have no dropout. PyTorch calls private functions of the packages, which change often.
"""

from __future__ import annotations

import torch

from ..caps import BackendUnavailable
from .system import first_line


def flash_impl() -> str:
    """The active flash kernel: "FA2" (PyTorch's own), "FA3" or "FA4"."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current and current()) or "FA2"


def use_flash_impl(impl: str) -> None:
    """Activate "FA2", "FA3" or "FA4" for the whole process.

    Raises:
        BackendUnavailable: it cannot run here.
    """
    if impl == flash_impl():
        return
    try:
        if impl == "FA2":
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(impl)
    except Exception as e:  # the import of the package may raise anything
        raise BackendUnavailable(
            f"PyTorch's flash kernel cannot be {impl} here: {type(e).__name__}: {first_line(e)} "
            "(it needs torch >= 2.11, the package, and a GPU that the package supports)"
        ) from e
