"""One package with two names: ``attention`` in a checkout, ``nanoattn`` where pip installed it.

Imported under both names it would be there twice: every operator registered anew, which PyTorch
refuses, and a Backend of one that is no Backend of the other. So whichever name is imported first
is the package, and from ``import attention`` on the other name gives the same modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


class Alias(MetaPathFinder, Loader):
    """Finds each module of the package `real` under the name `other` too."""

    def __init__(self, real: str, other: str) -> None:
        self.real, self.other = real, other
        for name in [n for n in sys.modules if f"{n}.".startswith(f"{real}.")]:
            sys.modules[other + name.removeprefix(real)] = sys.modules[name]

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:  # fmt: skip
        ours = name.startswith(f"{self.other}.")
        return ModuleSpec(name, self) if ours and find_spec(self._real(name)) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._real(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # the one for the other name: the import has set it
        module.__spec__ = module.__spec__.loader_state

    def _real(self, name: str) -> str:
        return self.real + name.removeprefix(self.other)


def share() -> None:
    """Make both names one package; called by attention/__init__.py once all it imports is there.

    Raises:
        ImportError: nanoattn was imported before, and its files are not these.
    """
    if "nanoattn" not in sys.modules:
        sys.meta_path.insert(0, Alias("attention", "nanoattn"))
        return
    here, there = Path(__file__).parent, Path(str(sys.modules["nanoattn"].__file__)).parent
    if contents(here) != contents(there):
        raise ImportError(
            f"nanoattn was imported from {there}, and attention in {here} is another version of "
            "it: a process can have one. Import attention first, or run pip install -e . there"
        )
    sys.meta_path.insert(0, Alias("nanoattn", "attention"))


def contents(folder: Path) -> dict[str, bytes]:
    """The source files of a package by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}
