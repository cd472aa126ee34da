"""Which flash kernel PyTorch's scaled_dot_product_attention uses on CUDA: --sdpa_flash_impl.

Since torch 2.11 its flash kernel can be replaced, for the whole process, by that of the package
FlashAttention-3 or -4. They have no dropout; reports then say "flash (FA3)". The functions that
PyTorch calls there are private, and FlashAttention-4 changes them between its pre-releases.
"""

from __future__ import annotations

import torch

from .spec import BackendUnavailable, version
from .system import import_version

# Major compute capabilities that each supports: _fa3.py, _fa4.py of torch/nn/attention in 2.13.
FLASH_IMPLS = {"FA2": (), "FA3": (9,), "FA4": (9, 10)}
# torch 2.11 to 2.13 expect two values from flash-attn-4's _flash_attn_fwd, which returns four or
# five since its pull request 2674, 4.0.0b19 (pytorch issue 190212; torch/nn/attention/_fa4.py).
FA4_TAKES_TWO, FA4_GIVES_TWO = (2, 13), version("4.0.0b18")  # the last torch, the last flash-attn-4


def flash_impl() -> str:
    """The flash kernel that PyTorch uses on CUDA now: its own, "FA2", or "FA3" or "FA4"."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current and current()) or "FA2"


def use_flash_impl(impl: str) -> None:
    """Make PyTorch use that flash kernel on CUDA, for the whole process.

    Raises:
        BackendUnavailable: it cannot run here. If its package failed to load, PyTorch's own kernel
            is active now; otherwise nothing has changed.
    """
    if impl not in FLASH_IMPLS:
        known = ", ".join(FLASH_IMPLS)
        raise BackendUnavailable(f"the flash kernel must be one of {known}, got {impl!r}")
    if impl == flash_impl():
        return
    if impl == "FA2":
        torch.nn.attention.restore_flash_attention_impl()
        return
    why = f"PyTorch's flash kernel cannot be {impl} here: "
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise BackendUnavailable(f"{why}that needs torch >= 2.11, this is {torch.__version__}")
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"{why}there is no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if major not in FLASH_IMPLS[impl]:
        need = "compute capability " + " and ".join(f"{m}.x" for m in FLASH_IMPLS[impl])
        has = f"{torch.cuda.get_device_name()} has {major}.{minor}"
        raise BackendUnavailable(f"{why}it is made for {need}, {has}")
    found = import_version("flash_attn.cute") if impl == "FA4" else None
    if found and version(torch.__version__)[:2] <= FA4_TAKES_TWO and version(found) > FA4_GIVES_TWO:
        calls = f"torch {torch.__version__} calls flash-attn-4 as it was up to 4.0.0b18"
        mend = "pip install flash-attn-4==4.0.0b17, or --attention_backend=flash_attn_4"
        raise BackendUnavailable(f"{why}{calls}, this is {found} ({mend})")
    try:
        torch.nn.attention.activate_flash_attention_impl(impl)
    except Exception as e:  # whatever the import of its package raises
        raise BackendUnavailable(f"{why}its package does not load ({type(e).__name__}: {e})") from e
