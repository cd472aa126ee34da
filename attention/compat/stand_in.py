"""`import flash_attn` for programs that cannot be changed, where flash-attn is not installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from . import bert_padding, functions


def as_flash_attn() -> None:
    """Let `import flash_attn` find these functions until the process ends.

    Call it before the program imports flash_attn. flash_attn, flash_attn.flash_attn_interface and
    flash_attn.bert_padding have the public functions of attention. Other modules, as
    flash_attn.layers.rotary, and private functions raise ImportError, as in a build without them.

    Raises:
        ImportError: flash-attn is installed.
    """
    known = sys.modules.get("flash_attn")
    if getattr(known, "flash_attn_func", None) is functions.flash_attn_func:
        return
    if known is not None or ((spec := find_spec("flash_attn")) and spec.origin):
        hint = "pip uninstall flash-attn, or import nanoattn's functions by name"
        raise ImportError(f"flash-attn is installed: as_flash_attn() would hide it ({hint})")
    # A spec without a loader: find_spec() works, and import_version() finds nothing installed.
    package = ModuleType("flash_attn", "nanoattn's functions under flash-attn's name.")
    package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    package.__path__ = []
    package.__version__ = "2.8.3"  # type: ignore[attr-defined]  # which functions.py follows
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.__spec__ = ModuleSpec(interface.__name__, None)
    public = {n: f for n, f in vars(functions).items() if n.startswith("flash_attn_")}
    vars(interface).update(public)
    vars(package).update(public, flash_attn_interface=interface, bert_padding=bert_padding)
    for module in (package, interface):
        sys.modules[module.__name__] = module
    sys.modules["flash_attn.bert_padding"] = bert_padding
