"""--sdpa_flash_impl: since torch 2.11 FlashAttention-3 or -4 can be PyTorch's flash kernel on CUDA.

They have no dropout. PyTorch calls private functions of the packages, which change often.
"""

from __future__ import annotations

import torch

from ..caps import BackendUnavailable, version
from .system import first_line, import_version


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
    why, found = f"PyTorch's flash kernel cannot be {impl} here", None
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        has = f"torch {torch.__version__} has only its own"
        raise BackendUnavailable(f"{why}: {has}; the choice came with 2.11")
    if impl == "FA4":
        found = import_version("flash_attn.cute")
    if found and version(found) > (4, 0, -1, 18) and version(torch.__version__) < (2, 14):
        raise BackendUnavailable(
            f"{why}: torch {torch.__version__} expects two results, which flash-attn-4 gives up to "
            f"4.0.0b18, this is {found} (pytorch issue 190212; pip install flash-attn-4==4.0.0b18, "
            "or --attention_backend=flash_attn_4)"
        )
    try:
        if impl == "FA2":
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(impl)
    except Exception as e:  # the import of the package may raise anything
        raise BackendUnavailable(
            f"{why}: {type(e).__name__}: {first_line(e)} "
            "(it needs the package, and a GPU that the package supports)"
        ) from e
