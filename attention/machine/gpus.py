"""GPUs by name, and their compute capabilities, from developer.nvidia.com/cuda-gpus and
/cuda-legacy-gpus. Their rates are in core/gpus.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace

from ..caps import dotted
from ..spec import Machine
from .system import UNKNOWN_VERSION

CAPABILITIES: dict[tuple[int, int], str] = {  # -> torch.cuda.get_device_name()
    (6, 0): "Tesla P100",
    (6, 1): "Tesla P40, NVIDIA TITAN Xp, NVIDIA GeForce GTX 1080 Ti, NVIDIA GeForce GTX "
            "1080, NVIDIA GeForce GTX 1070, NVIDIA GeForce GTX 1060",
    (7, 0): "Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-16GB, Tesla "
            "V100-PCIE-32GB, Tesla V100, NVIDIA TITAN V",
    (7, 5): "Tesla T4, NVIDIA TITAN RTX, Quadro RTX 8000, Quadro RTX 6000, NVIDIA GeForce "
            "RTX 2080 Ti, NVIDIA GeForce RTX 2080, NVIDIA GeForce RTX 2070, NVIDIA GeForce "
            "RTX 2060, NVIDIA GeForce GTX 1660, NVIDIA GeForce GTX 1650",
    (8, 0): "NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe, NVIDIA A100-SXM4-40GB, NVIDIA "
            "A30, NVIDIA A100, NVIDIA A800",
    (8, 6): "NVIDIA A40, NVIDIA A10, NVIDIA RTX A6000, NVIDIA GeForce RTX 3090, NVIDIA "
            "GeForce RTX 3090 Ti, NVIDIA A16, NVIDIA A2, NVIDIA RTX A5000, NVIDIA RTX "
            "A4000, NVIDIA RTX A2000, NVIDIA GeForce RTX 3080, NVIDIA GeForce RTX 3070, "
            "NVIDIA GeForce RTX 3060, NVIDIA GeForce RTX 3050",
    (8, 7): "NVIDIA Jetson Orin",
    (8, 9): "NVIDIA L40S, NVIDIA L40, NVIDIA L4, NVIDIA GeForce RTX 4090, NVIDIA RTX 6000 "
            "Ada Generation, NVIDIA GeForce RTX 4080, NVIDIA GeForce RTX 4070, NVIDIA "
            "GeForce RTX 4060",
    (9, 0): "NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe, NVIDIA H100 NVL, NVIDIA H200, NVIDIA "
            "H200 NVL, NVIDIA GH200 480GB, NVIDIA GH200 144G HBM3e, NVIDIA H100, NVIDIA "
            "H800, NVIDIA H20, NVIDIA GH200",
    (10, 0): "NVIDIA B200, NVIDIA GB200",
    (10, 3): "NVIDIA B300, NVIDIA GB300",
    (11, 0): "NVIDIA Jetson Thor",
    (12, 0): "NVIDIA GeForce RTX 5090, NVIDIA RTX PRO 6000 Blackwell, NVIDIA GeForce RTX "
            "5080, NVIDIA GeForce RTX 5070, NVIDIA GeForce RTX 5060",
    (12, 1): "NVIDIA GB10",
}
KNOWN = [
    *(Machine("cuda", name, at) for at, text in CAPABILITIES.items() for name in text.split(", ")),
    *(Machine("mps", f"Apple {chip}") for chip in ("M1", "M2", "M3", "M4", "M5", "mps")),
    Machine("cpu", "cpu"),
]
MAKERS = {"nvidia", "geforce", "tesla", "jetson", "apple", "generation"}  # not distinctive


def describe(text: str, torch: str, packages: Iterable[str]) -> Machine:
    """Return a known machine by its name or a distinctive part of it: "titan rtx", "4090", "cpu".

    Args:
        torch: version of PyTorch there.
        packages: import names of the packages there.

    Raises:
        ValueError: unknown, or several machines match; lists the nearest.
    """
    given = words(text)
    fit = [m for m in KNOWN if words(m.name) - MAKERS <= given]
    n_words = max((len(words(m.name)) for m in fit), default=0)
    fit = [m for m in fit if len(words(m.name)) == n_words]
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
