"""Dense peak rates, bandwidth, memory and links of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attention.machine.gpus import MAKERS, describe, nearest, words


@dataclass(frozen=True)
class GPU:
    """A longer name ("Laptop GPU", a MIG slice) does not match."""

    name: str  # torch.cuda.get_device_name()
    tflops: tuple[float, float | None, float]  # half, TF32, float32
    bandwidth: float  # GB/s
    memory: float  # GB
    source: str
    pattern: str = ""  # end of the device name; empty: `short`

    @property
    def short(self) -> str:
        """ "RTX 4090"."""
        return re.sub("NVIDIA |GeForce |Tesla |AMD Instinct ", "", self.name)


_A100, _H100, _H100_NVL = (312, 156, 19.5), (989.4, 494.7, 66.9), (835.5, 417.5, 60)
_V100, _V_SHEET = (125, None, 15.7), "NVIDIA V100 datasheet"
_A_SHEET, _H_SHEET = "NVIDIA A100 datasheet", "NVIDIA H100 datasheet"
_MI300X, _GH_SHEET = (1307.4, 653.7, 163.4), "NVIDIA GH200 datasheet"
_A_40GB = "A[18]00(-SXM4?|-PCIE)?[- ]40GB( PCIe| Active)?"
_H_BOTH = "NVIDIA H100 whitepaper and datasheet"

RATED = [  # of several variants the usual one first
    GPU("Tesla V100-SXM2-16GB", _V100, 900, 16, _V_SHEET),
    GPU("Tesla V100-SXM2-32GB", _V100, 900, 32, _V_SHEET),
    GPU("Tesla V100-PCIE-16GB", (112, None, 14), 900, 16, _V_SHEET),
    GPU("Tesla V100-PCIE-32GB", (112, None, 14), 900, 32, _V_SHEET),
    GPU("Tesla T4", (65, None, 8.1), 320, 16, "NVIDIA T4 datasheet"),
    GPU("NVIDIA TITAN RTX", (130.5, None, 16.3), 672, 24, "NVIDIA Turing whitepaper"),
    GPU("NVIDIA A100-SXM4-80GB", _A100, 2039, 80, _A_SHEET, "A[18]00-SXM4?-80GB"),
    GPU("NVIDIA A100 80GB PCIe", _A100, 1935, 80, _A_SHEET, "A[18]00(-PCIE-80GB| 80GB PCIe)"),
    GPU("NVIDIA A100-SXM4-40GB", _A100, 1555, 40, _A_SHEET, _A_40GB),
    GPU("NVIDIA A30", (165, 82, 10.3), 933, 24, "NVIDIA A30 datasheet"),
    GPU("NVIDIA A40", (149.7, 74.8, 37.4), 696, 48, "NVIDIA A40 datasheet"),
    GPU("NVIDIA A10", (125, 62.5, 31.2), 600, 24, "NVIDIA A10 datasheet"),
    GPU("NVIDIA RTX A6000", (154.8, 77.4, 38.7), 768, 48, "NVIDIA RTX A6000 datasheet"),
    GPU("NVIDIA GeForce RTX 3090", (71, 35.6, 35.6), 936, 24, "NVIDIA GA102 whitepaper"),
    GPU("NVIDIA GeForce RTX 3090 Ti", (80, 40, 40), 1008, 24, "NVIDIA GA102 whitepaper"),
    GPU("NVIDIA L40S", (362, 183, 91.6), 864, 48, "NVIDIA L40S datasheet"),
    GPU("NVIDIA L40", (181, 90.5, 90.5), 864, 48, "NVIDIA L40 datasheet"),
    GPU("NVIDIA L4", (121, 60, 30.3), 300, 24, "NVIDIA L4 datasheet"),
    GPU("NVIDIA GeForce RTX 4090", (165.2, 82.6, 82.6), 1008, 24, "NVIDIA Ada whitepaper"),
    GPU("NVIDIA H100 80GB HBM3", _H100, 3350, 80, _H_BOTH, "H100 80GB HBM3|H800"),
    GPU("NVIDIA H100 PCIe", (756, 378, 51.2), 2000, 80, _H_SHEET, "H[18]00 PCIe"),
    GPU("NVIDIA H100 NVL", _H100_NVL, 3900, 94, _H_SHEET),
    GPU("NVIDIA H200", _H100, 4800, 141, "NVIDIA H200 datasheet"),
    GPU("NVIDIA H200 NVL", _H100_NVL, 4800, 141, "NVIDIA H200 datasheet"),
    GPU("NVIDIA GH200 480GB", _H100, 4000, 96, _GH_SHEET, r"GH200 \d+GB?"),
    GPU("NVIDIA GH200 144G HBM3e", _H100, 4900, 144, _GH_SHEET, r"GH200 \d+GB? HBM3e"),
    GPU("NVIDIA B200", (2250, 1125, 75), 8000, 180, "NVIDIA HGX and DGX B200 datasheets"),
    GPU("NVIDIA GeForce RTX 5090", (209.5, 104.8, 104.8), 1792, 32, "NVIDIA RTX Blackwell paper"),
    GPU("AMD Instinct MI300X", _MI300X, 5300, 192, "AMD datasheet", "MI300X( OAM| VF)?"),
]


@dataclass(frozen=True)
class Server:
    """Links of a GPU, per direction."""

    nvlink: float  # GB/s, all links
    network: float | None  # GB/s, its share
    source: str


_DGX_H = "DGX H100/H200 user guide: NVLink 900 GB/s, 8 x 400 Gb/s"
_DGX_A = "DGX A100 user guide: NVLink 600 GB/s, 8 x 200 Gb/s"
SERVERS = {  # name above -> its server of eight
    "Tesla V100-SXM2-16GB": Server(150, 6.25, "DGX-1 whitepaper: 300 GB/s, 4 x 100 Gb/s"),
    "NVIDIA A100-SXM4-40GB": Server(300, 25, _DGX_A),
    "NVIDIA A100-SXM4-80GB": Server(300, 25, _DGX_A),
    "NVIDIA H100 80GB HBM3": Server(450, 50, _DGX_H),
    "NVIDIA H200": Server(450, 50, _DGX_H),
    "NVIDIA B200": Server(900, 50, "DGX B200 user guide: 1.8 TB/s, 8 x 400 Gb/s"),
    "AMD Instinct MI300X": Server(448, None, "AMD datasheet: Infinity Fabric 896 GB/s"),
}


def find_rated(name: str) -> GPU | None:
    patterns = ((gpu, gpu.pattern or re.escape(gpu.short)) for gpu in RATED)
    return next((gpu for gpu, p in patterns if re.search(rf"(?i)\b({p})$", name)), None)


def datasheet_bandwidth(name: str) -> tuple[float, str] | None:
    """(bytes/s, source)."""
    gpu = find_rated(name)
    return (gpu.bandwidth * 1e9, f"datasheet: {gpu.source}") if gpu else None


def describe_rated(text: str) -> tuple[GPU, str]:
    """A GPU ("H100": the usual one), and a note if several fit. Raises ValueError."""
    given, found = words(text) - MAKERS, find_rated(text)
    fit = [gpu for gpu in RATED if given and given <= words(gpu.name)]
    if not found:
        describe(text, "", ())
        if not fit:
            near = nearest(text, [gpu.name for gpu in RATED])
            raise ValueError(f"no rates known for {text!r}, but for {near}, ...")
        found = fit[0]
    others = ", ".join(gpu.name for gpu in fit if gpu is not found)
    note = f"{text!r} is taken as {found.name}" + (f"; also known: {others}" if others else "")
    return found, note if text != found.name else ""
