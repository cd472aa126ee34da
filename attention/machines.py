"""Machines by name, for "what would run there?": python -m attention --as="NVIDIA TITAN RTX".

A distinctive part of the name is enough: "titan rtx", "4090", "h100", "apple m3", "cpu".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .gpus import GPUS
from .spec import UNKNOWN_VERSION, Machine, dotted

APPLE = "Apple M1, Apple M2, Apple M3, Apple M4, Apple M5"
MAKERS = {"nvidia", "geforce", "tesla", "jetson", "apple", "generation"}  # not distinctive

Known = tuple[str, str, tuple[int, int] | None]  # device, name, compute capability
KNOWN: list[Known] = [
    *(("cuda", gpu.name, gpu.capability) for gpu in GPUS if gpu.capability),
    *(("mps", name, None) for name in APPLE.split(", ")),
    ("mps", "Apple mps", None),
    ("cpu", "cpu", None),
]


def find(text: str) -> Known:
    """The machine that the text names.

    A text with every distinctive word of a known name matches it, whatever else it says ("NVIDIA
    A100-SXM4-80GB"); otherwise all of its words must occur in a known name ("4090").

    Raises:
        ValueError: the name is unknown, or matches machines that differ; the text lists them.
    """
    asked = _words(text)
    fit = [k for k in KNOWN if _words(k[1]) - MAKERS <= asked]
    if fit:
        most = max(len(_words(k[1])) for k in fit)
        fit = [k for k in fit if len(_words(k[1])) == most]
    else:
        fit = [k for k in KNOWN if asked and asked <= _words(k[1])]
    if not fit:
        known = ", ".join(re.sub("NVIDIA |GeForce |Tesla |Apple mps", "", k[1]) for k in KNOWN)
        raise ValueError(f"unknown machine {text!r}; known: {known.replace(', ,', ',')}")
    if len({(device, capability) for device, _, capability in fit}) > 1:
        names = ", ".join(f"{name} ({dotted(at) if at else kind})" for kind, name, at in fit)
        raise ValueError(f"{text!r} could be {names}; say more of the name")
    kind, name, capability = min(fit, key=lambda k: len(k[1]))
    return kind, text if asked > _words(name) else name, capability


def describe(text: str, torch: str, packages: Iterable[str]) -> Machine:
    """The Machine that find() names, here or not, with these versions of PyTorch and packages."""
    kind, name, capability = find(text)
    installed = dict.fromkeys(packages, UNKNOWN_VERSION)
    return Machine(kind, name, capability, torch, packages=installed)


def _words(text: str) -> set[str]:
    """The words of a name: "RTX4090" has two."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"([rg]tx)(?=\d)", r"\1 ", text.lower())))
