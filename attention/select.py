"""From a backend's name to the one that will run, with every reason why others will not.

resolve()  is pure: it decides from what the backends declare, for any described machine, so what
           an RTX 4090 or an Apple laptop would run is tested anywhere.
select()   what a model calls: resolves, and has what was chosen run once (probing.py), until a
           backend passes.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch

from . import flash, flex, manual, own, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .probing import probe
from .spec import Backend, BackendUnavailable, Machine, Policy, Refusal, Resolution, Spec

log = logging.getLogger("nanoattn")

# Every kernel there is. A new one is a file with a BACKEND, imported above and named here.
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        manual.BACKEND, tiled.BACKEND, sdpa.BACKEND, sdpa.FLASH, sdpa.EFFICIENT, sdpa.CUDNN,
        sdpa.MATH, sdpa_bmm.BACKEND, flex.BACKEND, triton_flash.BACKEND, flash.V2, flash.V3,
        flash.V4, paged.BACKEND,
    )
}  # fmt: skip
RULES = ("auto", "fastest")  # not kernels: they choose one. autotune.py measures for "fastest"
_BY_ANY_NAME = {n: b for b in BACKENDS.values() for n in (b.name, *b.aliases)}

MPS_GUARD = Refusal(
    "on Apple's Metal it has given NaN and leaked future tokens "
    "(--allow_mps_sdpa=True runs it all the same)",
    "device",
)


def get(name: str) -> Backend:
    """The backend with that name or alias, or the one that a file defines, which is run (own.py).

    Raises:
        ValueError: unknown name; the message lists the known ones.
        BackendUnavailable: the file defines no backend that can be used.
    """
    if own.is_file(name):
        return own.load(name, _BY_ANY_NAME, RULES)
    if name not in _BY_ANY_NAME:
        near = difflib.get_close_matches(name, [*_BY_ANY_NAME, *RULES])
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join([*RULES, *_BY_ANY_NAME])
        raise ValueError(f"unknown attention backend {name!r}; {hint}known: {known}")
    return _BY_ANY_NAME[name]


def check_name(name: str) -> None:
    """A ValueError where no backend has that name. A file is not run, nor is it looked for."""
    if not (name in RULES or own.is_file(name)):
        get(name)


def packages(*names: str) -> tuple[str, ...]:
    """The import names of all packages that any backend needs, files among `names` included."""
    backends = [*BACKENDS.values(), *(get(name) for name in names if own.is_file(name))]
    rows = (c for b in backends for c in b.caps)
    return tuple(dict.fromkeys(p.partition(">=")[0] for c in rows for p in c.packages))


# --- resolve: what the backends declare ---


def _first_of_auto(spec: Spec, machine: Machine) -> str:
    """The first name that "auto" tries: the latest FlashAttention that is installed and supports
    this, else PyTorch's SDPA (which falls back to manual on Apple's Metal), or paged. To train on a
    CPU with matrix units it is SDPA with another backward, where that supports it."""
    names = ["flash_attn_4", "flash_attn_3", "flash_attn_2"] if machine.device == "cuda" else []
    if machine.matrix_units and spec.grad and not spec.compiled:
        names.append("sdpa_bmm")  # refused where spec.lse
    last = "paged" if spec.cache == "paged" else _beside_sdpa(spec, machine)
    return _first(names, spec, machine) or last


def _beside_sdpa(spec: Spec, machine: Machine, rejected: Iterable[str] = ()) -> str:
    """SDPA, or what to try where it cannot: where L is asked for the first that gives it (tiled
    does everywhere); for a softcap or sinks, which SDPA has nowhere, on CUDA first the fused
    kernels that have them, rather than hold all scores; else manual, which always works."""
    on_cuda = machine.device == "cuda"
    if spec.lse:
        names = ["sdpa_flash", "triton"] if on_cuda else ["sdpa_flash"]
        return _first(names, spec, machine, rejected) or "tiled"
    if spec.softcap or spec.sinks:
        names = ["flex", "triton"] if on_cuda else []
        return _first(names, spec, machine, rejected) or "manual"
    return "manual" if "sdpa" in rejected else "sdpa"


def _first(
    names: Iterable[str], spec: Spec, machine: Machine, rejected: Iterable[str] = ()
) -> str | None:
    there = (name for name in names if name in BACKENDS)
    able = (name for name in there if not BACKENDS[name].why_not(spec, machine))
    return next((name for name in able if name not in rejected), None)


def resolve(
    name: str, spec: Spec, machine: Machine, policy: Policy = Policy(), *,
    failed: Mapping[str, tuple[str, ...]] | None = None,
) -> Resolution:  # fmt: skip
    """Choose the backend that will run.

    Args:
        name: a backend's name, alias or file; or one of RULES, which name no kernel: they may fall
            back even with policy.fallback=False, and what they skip at first is not reported.
        failed: backends known not to run here, whatever they declare, with the reasons.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: refused, with no fallback left or allowed; lists every reason.
    """
    failed = failed or {}
    strict = not policy.fallback and name not in RULES
    backend = get(_first_of_auto(spec, machine) if name in RULES else name)
    rejected: dict[str, tuple[str, ...]] = {}
    while True:
        why = [*backend.why_not(spec, machine), *failed.get(backend.name, ())]
        on_metal = machine.device == "mps" and backend.name in ("sdpa", "sdpa_math")
        if on_metal and not policy.mps_sdpa:
            why.append(MPS_GUARD)
        if not why:
            return Resolution(name, backend, rejected)
        rejected[backend.name] = tuple(why)
        after = backend.fallback
        if after is not None and "sdpa" in rejected:
            after = _beside_sdpa(spec, machine, rejected)
        if after is None and spec.cache == "paged":  # the one thing manual cannot do
            after = "paged"
        if spec.lse and not (after and get(after).partial):
            after = _beside_sdpa(spec, machine, rejected)
        if strict or after is None or after in rejected:
            reasons = ". ".join(f"{n}: {'; '.join(w)}" for n, w in rejected.items())
            raise BackendUnavailable(f"attention backend {name!r} cannot run here. {reasons}")
        backend = get(after)


# --- select and announce ---


def select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
    shape: tuple[int, int] | None = None,
) -> Resolution:  # fmt: skip
    """Resolve `name` on this machine, falling back until a backend passes the probe.

    Args:
        shape: batch size and tokens a sequence, if known, for math_note().
    """
    machine = Machine.here(str(device), packages(name))
    failed: dict[str, tuple[str, ...]] = {}
    while True:
        chosen = resolve(name, spec, machine, policy, failed=failed)
        tried = probe(chosen.backend, spec, device)
        if not tried.why:
            note = math_note(chosen.backend, spec, shape) if "math" in tried.kernels else ""
            return replace(chosen, kernels=tried.kernels, note=note, proof=tried.proof)
        failed[chosen.backend.name] = tried.why


def math_note(backend: Backend, spec: Spec, shape: tuple[int, int] | None) -> str:
    """A warning where PyTorch's math kernel would hold more than 1 GB of scores; else empty.

    It keeps the scores and their softmax, (B, H, T, T) each, in at least float32.
    """
    B, T = shape or (0, 0)
    size = 2 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * T * T
    if size <= 1e9:
        return ""
    return (
        f"{backend.name} runs PyTorch's math kernel here, which holds every score: "
        f"{size / 1e9:.1f} GB in each layer at batch size {B} and {T:,} tokens.\n"
        "What the fused kernels refuse, python -m attention tells; --attention_backend=tiled needs "
        "no such memory."
    )


def announce(chosen: Resolution, phase: str = "") -> None:
    """Log what will run and what was refused: once a process, on rank 0 only."""
    if int(os.environ.get("RANK", "0")):
        return
    for warning in chosen.warnings():
        _once(logging.WARNING, warning.replace("\n", "\n         "))
    _once(logging.INFO, chosen.info() + phase)


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)
