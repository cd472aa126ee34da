"""flash-attn 2.8's functions on any device (docs/ATTENTION.md)."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from . import bert_padding, functions, rotary


def as_flash_attn() -> None:
    """Let `import flash_attn` find these functions. Raises ImportError: flash-attn is installed."""
    known = sys.modules.get("flash_attn")
    if getattr(known, "flash_attn_func", None) is functions.flash_attn_func:
        return
    if known is not None or ((spec := find_spec("flash_attn")) and spec.origin):
        hint = "pip uninstall flash-attn, or import nanoattn's functions by name"
        raise ImportError(f"flash-attn is installed: as_flash_attn() would hide it ({hint})")
    public = {name: f for name, f in vars(functions).items() if name.startswith("flash_attn_")}
    packages = {"": public | {"__version__": "2.8.3"}, ".flash_attn_interface": public,
                ".layers": {}, ".ops": {}, ".ops.triton": {}}
    made = {"flash_attn.bert_padding": bert_padding, "flash_attn.layers.rotary": rotary,
            "flash_attn.ops.triton.rotary": rotary}
    for name, content in (("flash_attn" + n, content) for n, content in packages.items()):
        made[name] = ModuleType(name)
        # Without a loader find_spec() works, and import_version() finds nothing.
        spec = ModuleSpec(name, None, is_package=True)
        vars(made[name]).update(content, __path__=[], __spec__=spec)
    sys.modules.update(made)
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
