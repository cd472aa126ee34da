"""Machines by name, for "what would run there?": python -m attention --as="NVIDIA TITAN RTX".

A name is known by its distinctive part: "titan rtx", "4090", "h100", "apple m3", "cpu". Compute
capabilities are those of NVIDIA's lists (developer.nvidia.com/cuda-gpus and /cuda-legacy-gpus). The
A800, H800 and H20, which they leave out, are an A100 and two kinds of H100 made for export; Jetson
Thor is there by its modules, T5000 and T4000.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attention.spec import UNKNOWN_VERSION, Machine, dotted, version

CUDA = {
    (6, 0): "Tesla P100",
    (6, 1): "Tesla P40, NVIDIA TITAN Xp, NVIDIA GeForce GTX 1080 Ti, NVIDIA GeForce GTX 1080, "
            "NVIDIA GeForce GTX 1070, NVIDIA GeForce GTX 1060",
    (7, 0): "Tesla V100, NVIDIA TITAN V",
    (7, 5): "Tesla T4, NVIDIA TITAN RTX, Quadro RTX 8000, Quadro RTX 6000, "
            "NVIDIA GeForce RTX 2080 Ti, NVIDIA GeForce RTX 2080, NVIDIA GeForce RTX 2070, "
            "NVIDIA GeForce RTX 2060, NVIDIA GeForce GTX 1660, NVIDIA GeForce GTX 1650",
    (8, 0): "NVIDIA A100, NVIDIA A800, NVIDIA A30",
    (8, 6): "NVIDIA A40, NVIDIA A16, NVIDIA A10, NVIDIA A2, NVIDIA RTX A6000, NVIDIA RTX A5000, "
            "NVIDIA RTX A4000, NVIDIA RTX A2000, NVIDIA GeForce RTX 3090 Ti, "
            "NVIDIA GeForce RTX 3090, NVIDIA GeForce RTX 3080, NVIDIA GeForce RTX 3070, "
            "NVIDIA GeForce RTX 3060, NVIDIA GeForce RTX 3050",
    (8, 7): "NVIDIA Jetson Orin",
    (8, 9): "NVIDIA L40S, NVIDIA L40, NVIDIA L4, NVIDIA RTX 6000 Ada Generation, "
            "NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 4080, NVIDIA GeForce RTX 4070, "
            "NVIDIA GeForce RTX 4060",
    (9, 0): "NVIDIA H100, NVIDIA H200, NVIDIA H800, NVIDIA H20, NVIDIA GH200",
    (10, 0): "NVIDIA B200, NVIDIA GB200",
    (10, 3): "NVIDIA B300, NVIDIA GB300",
    (11, 0): "NVIDIA Jetson Thor",
    (12, 0): "NVIDIA RTX PRO 6000 Blackwell, NVIDIA GeForce RTX 5090, NVIDIA GeForce RTX 5080, "
             "NVIDIA GeForce RTX 5070, NVIDIA GeForce RTX 5060",
    (12, 1): "NVIDIA GB10",
}  # fmt: skip
APPLE = "Apple M1, Apple M2, Apple M3, Apple M4, Apple M5"
MAKERS = {"nvidia", "geforce", "tesla", "jetson", "apple", "generation"}  # words that tell little

Known = tuple[str, str, tuple[int, int] | None]  # device, name, compute capability
KNOWN: list[Known] = [
    *(("cuda", name, at) for at, names in CUDA.items() for name in names.split(", ")),
    *(("mps", name, None) for name in APPLE.split(", ")),
    ("mps", "Apple mps", None),
    ("cpu", "cpu", None),
]


def find(text: str) -> Known:
    """The machine that is meant: device, name, compute capability.

    A text that has every distinctive word of a known name is that machine, whatever else it says
    ("NVIDIA A100-SXM4-80GB"); else all of its words must be in a known name ("4090").

    Raises:
        ValueError: unknown, or several that differ; lists them.
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
        known = known.replace(", ,", ",")
        raise ValueError(
            f"unknown machine {text!r}; known: {known}; --capability=8.9 describes another GPU"
        )
    if len({(device, capability) for device, _, capability in fit}) > 1:
        names = ", ".join(f"{name} ({dotted(at) if at else kind})" for kind, name, at in fit)
        raise ValueError(
            f"{text!r} could be {names}; say more of the name, or its --capability=8.9"
        )
    kind, name, capability = min(fit, key=lambda k: len(k[1]))
    return kind, text if asked > _words(name) else name, capability


def describe(text: str | None, capability: str | None, torch: str, cuda: str | None,
             packages: str, known_packages: Iterable[str]) -> Machine:  # fmt: skip
    """A Machine that need not be there.

    Args:
        text: its name, or a part of it; any name with a capability.
        capability: "8.9"; None: the name's.
        torch, cuda: versions.
        packages: "all", "none", or "flash_attn=2.8.3,triton": what is installed.

    Raises:
        ValueError: a name, a capability or a package that is not known.
    """
    if capability is None:
        kind, name, at = find(text or "")
    else:
        if not re.fullmatch(r"\d+\.\d+", capability):
            raise ValueError(f"--capability must be like 8.9, got {capability!r}")
        major, minor = version(capability)
        kind, name, at = "cuda", text or "a GPU", (major, minor)
        try:
            found = find(name)
        except ValueError:
            pass  # that is what --capability is for
        else:
            if found[0] != "cuda":
                raise ValueError(f"{found[1]} has no compute capability, got {capability}")
            name = found[1]
    installed = dict.fromkeys(known_packages, UNKNOWN_VERSION)
    if packages != "all":
        pairs = [p.partition("=") for p in packages.split(",") if p and packages != "none"]
        for package, _, _ in pairs:
            if package not in installed:
                raise ValueError(
                    f"no backend asks for the package {package!r}; they ask for "
                    f"{', '.join(installed) or 'none'}"
                )
        installed = {p: v.lstrip("=") or UNKNOWN_VERSION for p, _, v in pairs}
    return Machine(kind, name, at, torch, cuda, installed)


def _words(text: str) -> set[str]:
    """The words of a name: "RTX4090" has two."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"([rg]tx)(?=\d)", r"\1 ", text.lower())))
