"""A name -> the backend that will run, with every reason for what will not.

Pure: what comes out depends on the arguments alone, so that what an RTX 4090 or an Apple laptop
would do is decided, and tested, on any machine. Whether the kernel really runs, probe.py finds out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from attention import flash, flex, manual, paged, sdpa, tiled, triton_flash
from attention.spec import Backend, BackendUnavailable, Machine, Resolution, Spec

BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        manual.BACKEND,
        tiled.BACKEND,
        sdpa.BACKEND,
        sdpa.FLASH,
        sdpa.EFFICIENT,
        sdpa.CUDNN,
        sdpa.MATH,
        flex.BACKEND,
        triton_flash.BACKEND,
        flash.V2,
        flash.V3,
        flash.V4,
        paged.BACKEND,
    )
}
RULES = ("auto", "fastest")  # not kernels: they choose one. autotune.py measures for "fastest"
_BY_ANY_NAME = {n: b for b in BACKENDS.values() for n in (b.name, *b.aliases)}

MPS_GUARD = (
    "on Apple's Metal it has given NaN and leaked future tokens "
    "(--allow_mps_sdpa=True runs it all the same)"
)


def get(name: str) -> Backend:
    """The backend of that name or alias.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in _BY_ANY_NAME:
        near = difflib.get_close_matches(name, [*_BY_ANY_NAME, *RULES], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join([*RULES, *_BY_ANY_NAME])
        raise ValueError(f"unknown attention backend {name!r}; {hint}known: {known}")
    return _BY_ANY_NAME[name]


def _rule(spec: Spec, machine: Machine) -> str:
    """Where "auto" begins."""
    if machine.device == "cuda":
        for name in ("flash_attn_4", "flash_attn_3", "flash_attn_2"):
            if name in BACKENDS and not BACKENDS[name].why_not(spec, machine):
                return name
    return "paged" if spec.cache == "paged" else "sdpa"


def packages() -> tuple[str, ...]:
    """The import names of all packages that some backend needs."""
    rows = (c for b in BACKENDS.values() for c in b.caps)
    return tuple(dict.fromkeys(p.partition(">=")[0] for c in rows for p in c.packages))


def resolve(name: str, spec: Spec, machine: Machine, fallback: bool = True, *,
            allow_mps_sdpa: bool = False,
            failed: Mapping[str, tuple[str, ...]] | None = None) -> Resolution:  # fmt: skip
    """Choose the backend that will run.

    Args:
        name: a backend's name or alias, or "auto": on CUDA the latest FlashAttention that is
            installed and can do this, else PyTorch's SDPA, or paged for a paged cache; on Apple's
            Metal manual. What "auto" passes over because it is not installed, or not made for
            this, is not reported.
        fallback: go on to the next name when one is refused; False makes a refusal an error.
            "auto" names no kernel, so it may always go on.
        allow_mps_sdpa: lift the guard that keeps SDPA off Apple's Metal.
        failed: backends that are known not to run here whatever they declare, with the reasons.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: refused, and nothing left that may be tried; lists every reason.
    """
    failed = failed or {}
    strict = not fallback and name not in RULES
    backend = get(_rule(spec, machine) if name in RULES else name)
    rejected: dict[str, tuple[str, ...]] = {}
    while True:
        why = [*backend.why_not(spec, machine), *failed.get(backend.name, ())]
        if backend.name in ("sdpa", "sdpa_math") and machine.device == "mps" and not allow_mps_sdpa:
            why.append(MPS_GUARD)
        if not why:
            return Resolution(name, backend, rejected)
        rejected[backend.name] = tuple(why)
        after = backend.fallback
        if after is None and spec.cache == "paged":  # manual always works, but for this
            after = "paged"
        if strict or after is None or after in rejected:
            reasons = ". ".join(f"{n}: {'; '.join(w)}" for n, w in rejected.items())
            raise BackendUnavailable(f"attention backend {name!r} cannot run here. {reasons}")
        backend = get(after)
