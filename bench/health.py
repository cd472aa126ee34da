"""What disturbs a measurement: other processes, heat, a throttled clock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bench.machine import nvidia_smi

# Those of nvidia-smi's clocks_event_reasons that slow a GPU down.
REASONS = {
    0x4: "its power cap",
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}


@contextmanager
def watched(ask: Callable[[str], list[list[str]]] = nvidia_smi) -> Iterator[dict[str, Any]]:
    """Look at the GPU every two seconds while a stage runs. The dict is filled at the end: why the
    clock was throttled, the highest temperature and power, other processes."""
    seen: dict[str, Any] = {}
    over = threading.Event()
    reasons, hot, watts = set[str](), [0.0], [0.0]

    def look() -> None:
        while True:
            for line in ask("clocks_event_reasons.active,temperature.gpu,power.draw"):
                with suppress(ValueError):
                    bits = int(line[0], 16)
                    reasons.update(text for bit, text in REASONS.items() if bits & bit)
                    hot.append(float(line[1]))
                    watts.append(float(line[2]))
            if over.wait(2):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(timeout=12)
        if len(hot) > 1:
            seen |= {"held_down_by": sorted(reasons), "celsius": max(hot), "watts": max(watts)}


def busy(device: str, ask: Callable[[str], list[list[str]]] = nvidia_smi) -> list[str]:
    """Which other processes are busy on this machine before ours start."""
    found = []
    if device == "cuda":
        for i, line in enumerate(ask("memory.used,utilization.gpu")):
            with suppress(ValueError, IndexError):
                used, share = float(line[0]), float(line[1])
                if used > 1000 or share > 10:
                    found.append(
                        f"GPU {i} was in use before we began: {used:,.0f} MB, {share:.0f}%"
                    )
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > (os.cpu_count() or 1) / 2:
        found.append(f"the CPU was busy before we began: a load of {load:.1f}")
    return found
