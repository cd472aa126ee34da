"""`import flash_attn` for programs that cannot be changed, where flash-attn is not installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from . import bert_padding, flash_api


def as_flash_attn() -> None:
    """Let `import flash_attn` find these functions until the process ends.

    Call it before the program imports flash_attn. There are flash_attn,
    flash_attn.flash_attn_interface and flash_attn.bert_padding, with the public functions of
    attention. Other modules, as flash_attn.layers.rotary, raise ModuleNotFoundError, and private
    functions ImportError, as in a build without them.

    Raises:
        ImportError: flash-attn is installed.
    """
    known = sys.modules.get("flash_attn")
    if getattr(known, "flash_attn_func", None) is flash_api.flash_attn_func:
        return
    if known is not None or ((spec := find_spec("flash_attn")) and spec.origin):
        raise ImportError(
            "flash-attn is installed, and nanoattn calls it: as_flash_attn() would hide it from "
            "both (pip uninstall flash-attn, or import nanoattn's functions by name)"
        )
    # A spec without a loader: find_spec() works, and import_version() finds nothing installed.
    package = ModuleType("flash_attn", "nanoattn's functions under flash-attn's name.")
    package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    package.__path__ = []
    package.__version__ = "2.8.3"  # type: ignore[attr-defined]  # which flash_api.py follows
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.__spec__ = ModuleSpec(interface.__name__, None)
    for name, value in vars(flash_api).items():
        if name.startswith("flash_attn_"):
            setattr(package, name, value)
            setattr(interface, name, value)
    for module in (interface, bert_padding):
        name = module.__name__.rpartition(".")[2]
        setattr(package, name, module)
        sys.modules[f"flash_attn.{name}"] = module
    sys.modules["flash_attn"] = package
