"""Compute capabilities of GPUs (developer.nvidia.com/cuda-gpus, cuda-legacy-gpus)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace

from ..caps import dotted
from ..spec import Machine
from .system import UNKNOWN_VERSION

CAPABILITIES: dict[tuple[int, int], str] = {  # get_device_name() less "NVIDIA "
    (6, 0): "Tesla P100",
    (6, 1): "Tesla P40, TITAN Xp, GeForce GTX 1080 Ti, GeForce GTX 1080, GeForce GTX 1070, "
            "GeForce GTX 1060",
    (7, 0): "Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-16GB, Tesla "
            "V100-PCIE-32GB, Tesla V100, TITAN V",
    (7, 5): "Tesla T4, TITAN RTX, Quadro RTX 8000, Quadro RTX 6000, GeForce RTX 2080 Ti, GeForce "
            "RTX 2080, GeForce RTX 2070, GeForce RTX 2060, GeForce GTX 1660, GeForce GTX 1650",
    (8, 0): "A100-SXM4-80GB, A100 80GB PCIe, A100-SXM4-40GB, A30, A100, A800",
    (8, 6): "A40, A10, RTX A6000, GeForce RTX 3090, GeForce RTX 3090 Ti, A16, A2, RTX A5000, RTX "
            "A4000, RTX A2000, GeForce RTX 3080, GeForce RTX 3070, GeForce RTX 3060, GeForce RTX "
            "3050",
    (8, 7): "Jetson Orin",
    (8, 9): "L40S, L40, L4, GeForce RTX 4090, RTX 6000 Ada Generation, GeForce RTX 4080, GeForce "
            "RTX 4070, GeForce RTX 4060",
    (9, 0): "H100 80GB HBM3, H100 PCIe, H100 NVL, H200, H200 NVL, GH200 480GB, GH200 144G HBM3e, "
            "H100, H800, H20, GH200",
    (10, 0): "B200, GB200",
    (10, 3): "B300, GB300",
    (11, 0): "Jetson Thor",
    (12, 0): "GeForce RTX 5090, RTX PRO 6000 Blackwell, GeForce RTX 5080, GeForce RTX 5070, "
            "GeForce RTX 5060",
    (12, 1): "GB10"}
KNOWN = [
    *(Machine("cuda", name if name.startswith(("Tesla", "Quadro")) else f"NVIDIA {name}", at)
      for at, text in CAPABILITIES.items() for name in text.split(", ")),
    *(Machine("mps", f"Apple {chip}") for chip in ("M1", "M2", "M3", "M4", "M5", "mps")),
    Machine("cpu", "cpu")]
MAKERS = {"nvidia", "geforce", "tesla", "jetson", "apple", "generation"}  # not distinctive


def describe(text: str, torch: str, packages: Iterable[str]) -> Machine:
    """A machine by part of its name ("4090", "cpu"). Raises ValueError: none or several match."""
    given = words(text)
    fit = [m for m in KNOWN if words(m.name) - MAKERS <= given]
    longest = max((len(words(m.name)) for m in fit), default=0)
    fit = [m for m in fit if len(words(m.name)) == longest]
    fit = fit or [m for m in KNOWN if given and given <= words(m.name)]
    if not fit:
        near = nearest(text, [m.name for m in KNOWN])
        raise ValueError(f"unknown machine {text!r}; known are {near}, ...")
    if len({(m.device, m.capability) for m in fit}) > 1:
        could = [f"{m.name} ({dotted(m.capability) if m.capability else m.device})" for m in fit]
        more = f" or {len(could) - 6} others" if len(could) > 6 else ""
        raise ValueError(f"{text!r} could be {', '.join(could[:6])}{more}; give more of the name")
    found = min(fit, key=lambda m: len(m.name))
    name = text if given > words(found.name) else found.name
    return replace(found, name=name, torch=torch, packages=dict.fromkeys(packages, UNKNOWN_VERSION))


def nearest(text: str, known: Iterable[str]) -> str:
    names = {" ".join(sorted(words(name) - MAKERS)): name for name in known}
    wanted = " ".join(sorted(words(text) - MAKERS))
    near = [names[n] for n in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)]
    return ", ".join(near or ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"])


def words(text: str) -> set[str]:
    # "RTX4090" is two words.
    return set(re.findall(r"[a-z0-9]+", re.sub(r"([rg]tx)(?=\d)", r"\1 ", text.lower())))
