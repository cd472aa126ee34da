"""The choice of a backend, with the reasons to refuse others.

resolve()  reads declared capabilities only: it can choose for a described machine.
select()   resolves, then probes the chosen backend (probing.py), until one passes.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol, TypeVar

import torch

from . import flash, flex, manual, own, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .caps import Backend, BackendUnavailable, Refusal, Resolution, version
from .machine.apart import apart
from .probing import LONG, Probe, probe, wrong_at
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")
T = TypeVar("T")

# A new kernel is a file with a BACKEND, imported above and listed here.
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        manual.BACKEND, tiled.BACKEND, sdpa.BACKEND, sdpa.FLASH, sdpa.EFFICIENT, sdpa.CUDNN,
        sdpa.MATH, sdpa_bmm.BACKEND, flex.BACKEND, flex.FLASH, triton_flash.BACKEND, flash.V2,
        flash.V3, flash.V4, paged.BACKEND,
    )
}
REFERENCES = ("manual", "sdpa_math")  # O(T^2) memory, and no tiles: not probed at length
RULES = ("auto", "fastest")  # they choose a kernel, by PREFERENCE or by timing (choose.py)
_BY_ANY_NAME = {n: b for b in BACKENDS.values() for n in (b.name, *b.aliases)}


def metal_bug(spec: Spec, machine: Machine) -> list[Refusal]:
    """The known bug of PyTorch's SDPA on Apple's Metal that this request meets, if any."""
    release, half = version(machine.torch), spec.dtype in ("float16", "bfloat16")
    bugs = {  # those of pytorch/pytorch that the probe may miss, or that depend on what ran before
        "half precision sees up to three later tokens (issue 195910)": half and release < (2, 13),
        "a scale may be that of an earlier call (pull request 184122)":
            spec.scale is not None and release < (2, 13),
        "a mask that the heads share is misread (pull request 184180)":
            (spec.segments or spec.cache == "static") and release < (2, 13),
        "strides are misread, rows without a key are NaN (issues 163597, 156707)":
            release < (2, 9),
    }
    where = f"on Apple's Metal torch {machine.torch} is wrong"
    permit = "(newer torch, or --allow_mps_sdpa=True)"
    return [Refusal(f"{where}: {bug} {permit}", "metal") for bug, met in bugs.items() if met][:1]


def is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or bool(os.altsep and os.altsep in name)


def get(name: str) -> Backend:
    """The backend with that name or alias. A file is run (own.py).

    Raises:
        ValueError: unknown name.
        BackendUnavailable: the file does not define a valid backend.
    """
    if is_file(name):
        backend = own.load(os.path.abspath(name))
        if taken := {backend.name, *backend.aliases} & {*_BY_ANY_NAME, *RULES}:
            raise own.invalid(name, f"its name {min(taken)!r} is taken")
        if not (backend.fallback is None or backend.fallback in _BY_ANY_NAME):
            raise own.invalid(name, f"its fallback {backend.fallback!r} is not a backend")
        return backend
    if name not in _BY_ANY_NAME:
        near = difflib.get_close_matches(name, [*_BY_ANY_NAME, *RULES])
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join([*RULES, *_BY_ANY_NAME])
        raise ValueError(f"unknown attention backend {name!r}; {hint}known: {known}")
    return _BY_ANY_NAME[name]


def check_name(name: str) -> None:
    """Raise ValueError if the name is unknown. A file is neither opened nor run."""
    if not isinstance(name, str):
        raise ValueError(f"a backend has a name or a path, got {name!r}")
    if not (name in RULES or is_file(name)):
        get(name)


def packages(*names: str) -> tuple[str, ...]:
    """The import names of all packages that the backends need, including files in `names`."""
    backends = [*BACKENDS.values(), *(get(name) for name in names if is_file(name))]
    rows = (c for b in backends for c in (*b.caps, *(b.prebuilt.caps if b.prebuilt else ())))
    return tuple(dict.fromkeys(p.partition(">=")[0] for c in rows for p in c.packages))


# --- resolve ---

# The order in which "auto" tries the kernels of a device. A refused backend falls back to its
# `fallback`, then to the first of these that can run. flex is not tried on a CPU, where it needs a
# C++ compiler.
PREFERENCE = {
    "cuda": ("flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "paged", "sdpa_flash", "flex",
             "triton", "manual", "tiled"),
    "cpu": ("sdpa", "paged", "sdpa_flash", "manual", "tiled"),
    "mps": ("sdpa", "paged", "manual", "tiled"),
}


def preferred(spec: Spec, machine: Machine) -> list[str]:
    """PREFERENCE, with what is faster on this machine first."""
    if machine.device not in PREFERENCE:
        raise BackendUnavailable(f"no kernel runs on {machine.device}")
    order = [*PREFERENCE[machine.device]]

    def before(first: str, then: str) -> None:
        order.remove(first)
        order.insert(order.index(then), first)

    if machine.device == "cuda":
        major = (machine.capability or (0, 0))[0]
        if major >= 9:  # sdpa may take cuDNN's kernel
            before("sdpa", "flash_attn_2")
        if major in (8, 12):  # there 4 uses the instructions of Ampere, as 2 does
            before("flash_attn_2" if major == 8 else "sdpa", "flash_attn_4")
        if spec.window is not None or spec.segments:  # it skips tiles, sdpa takes a mask
            before("sdpa_flash", "sdpa")
            # sdpa_flash takes windows from 2.12 on, and by segments it breaks a compiled graph.
            if spec.compiled or version(machine.torch) < (2, 12):
                before("triton", "sdpa_flash")
    elif machine.bfloat16_units and spec.grad and not spec.compiled:
        order.insert(0, "sdpa_bmm")  # a faster backward, which Dynamo does not trace
    return order


def admit(
    name: str, spec: Spec, machine: Machine, policy: Policy = Policy()
) -> tuple[Backend, list[Refusal]]:
    """The backend of that name, or its prebuilt kernel if allowed, and every reason why it cannot
    run `spec` on `machine`; empty if it can."""
    backend = get(name)
    if policy.hub_kernels and backend.prebuilt and not backend.prebuilt.why_not(spec, machine):
        return backend.prebuilt, []
    why = backend.why_not(spec, machine)
    on_metal = machine.device == "mps" and backend.name in ("sdpa", "sdpa_math")
    return backend, why + metal_bug(spec, machine) if on_metal and not policy.mps_sdpa else why


def resolve(
    name: str, spec: Spec, machine: Machine, policy: Policy = Policy(), *,
    failed: Mapping[str, tuple[str, ...]] | None = None,
) -> Resolution:
    """Choose the backend that will run.

    Args:
        name: a backend's name, alias or file, or one of RULES.
        failed: backends known not to run here, with the reasons.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: refused, with no fallback left or allowed; lists every reason.
    """
    failed, names = failed or {}, preferred(spec, machine)
    if name not in RULES:
        after = get(name).fallback
        names = [name, *([after] if after else []), *names] if policy.fallback else [name]
    refused: dict[str, tuple[str, ...]] = {}
    reported: dict[str, tuple[str, ...]] = {}
    for candidate in names:
        backend, why = admit(candidate, spec, machine, policy)
        if backend.name in refused:
            continue
        found = failed.get(backend.name, ())
        if not why and not found:
            return Resolution(name, backend, reported)
        refused[backend.name] = (*why, *found)
        # Report another kernel only if its Caps would have let it run.
        if candidate == name or found or [w.kind for w in why] == ["metal"]:
            reported[backend.name] = refused[backend.name]
    reasons = ". ".join(f"{n}: {'; '.join(w)}" for n, w in refused.items())
    raise BackendUnavailable(f"attention backend {name!r} cannot run here. {reasons}")


# --- select and announce ---


class Ranks(Protocol):
    """Processes that choose together: each calls gather() with its own value."""

    @property
    def rank(self) -> int: ...
    def gather(self, value: T, /) -> list[T]: ...  # of every process, in order of rank


def select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
    shape: tuple[int, int] | None = None, ranks: Ranks | None = None,
) -> Resolution:
    """Resolve `name` on this machine, falling back until a backend passes the probe.

    Args:
        shape: batch size and tokens in a sequence; if known, that length is probed too.
        ranks: processes that call this together. All take the first backend that each accepts.
    """
    return apart(device, lambda: _select(name, spec, device, policy, shape, ranks))


def _select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy,
    shape: tuple[int, int] | None, ranks: Ranks | None,
) -> Resolution:
    if torch.device(device).type == "meta":  # shapes only
        return Resolution(name, manual.BACKEND)
    machine, T = Machine.here(str(device)), shape[1] if shape else 0
    rule, dropped = name, dict[str, tuple[str, ...]]()
    failed: dict[str, tuple[str, ...]] = {}
    tried = Probe()

    def refusals(picked: str) -> tuple[str, ...]:
        """Every reason why the backend cannot run here; empty if it passes the probe."""
        nonlocal tried
        named = rule not in RULES and get(rule).name == picked  # a file has its path only
        backend, why = admit(rule if named else picked, spec, machine, policy)
        if why:
            return tuple(why)
        tried = probe(backend, spec, device)
        if not tried.why and T > LONG and backend.name not in REFERENCES:
            return wrong_at(backend, spec, device, T)
        return tried.why

    while True:
        error = None
        try:
            chosen = resolve(rule, spec, machine, policy, failed=failed)
            picks = gather(ranks, (chosen.backend.name, ""))
        except BackendUnavailable as e:
            error, picks = e, gather(ranks, ("", str(e)))
        if any(text for _, text in picks):
            if error and all(text for _, text in picks):
                raise error
            why = by_rank([[text] if text else [] for _, text in picks])
            if not policy.fallback or rule != name:
                raise BackendUnavailable("; ".join(why))
            rule, dropped = "auto", {name: why}  # a file that only some ranks can load
            continue
        names = dict.fromkeys(picked for picked, _ in picks)
        answers = gather(ranks, {picked: refusals(picked) for picked in names})
        refused = {picked: by_rank([answer[picked] for answer in answers]) for picked in names}
        if len(names) == 1 and not any(refused.values()):
            chosen = replace(chosen, requested=name, rejected={**dropped, **chosen.rejected})
            warn(chosen)
            note = math_note(chosen.backend, spec, shape) if "math" in tried.kernels else ""
            return replace(chosen, kernels=tried.kernels, note=note, proof=tried.proof)
        failed |= {picked: why for picked, why in refused.items() if why}


def gather(ranks: Ranks | None, value: T) -> list[T]:
    return [value] if ranks is None else ranks.gather(value)


def by_rank(answers: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The reasons of all ranks, with the ranks that gave each; without if all did."""
    who: dict[str, list[str]] = {}
    for rank, reasons in enumerate(answers):
        for reason in reasons:
            who.setdefault(reason, []).append(str(rank))
    return tuple(
        reason if len(n) == len(answers) else f"rank {', '.join(n)}: {reason}"
        for reason, n in who.items()
    )


def math_note(backend: Backend, spec: Spec, shape: tuple[int, int] | None) -> str:
    """A warning if PyTorch's math kernel would store more than 1 GB of scores; else empty."""
    B, T = shape or (0, 0)  # scores and softmax, (B, H, T, T) each, in at least float32
    size = 2 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * T * T
    if size <= 1e9:
        return ""
    return (
        f"{backend.name} runs PyTorch's math kernel, which stores {size / 1e9:.1f} GB of scores in "
        f"each layer at batch size {B} and {T:,} tokens.\n"
        "python -m attention lists why fused kernels refuse; --attention_backend=tiled stores none."
    )


def announce(chosen: Resolution, phase: str = "") -> None:
    """Log the chosen backend and the refused ones, once per process, on rank 0 only."""
    warn(chosen)
    if int(os.environ.get("RANK", "0")) == 0:
        _once(logging.INFO, chosen.info() + phase)


def warn(chosen: Resolution) -> None:
    for warning in chosen.warnings() if int(os.environ.get("RANK", "0")) == 0 else ():
        _once(logging.WARNING, warning.replace("\n", "\n         "))


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)
