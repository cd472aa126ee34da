"""The choice of a backend, with the reasons to refuse others.

    names()   the backends to try, best first: a name and its fallback, or "auto"'s order
    resolve() the first whose declared Caps admit the request: also for a described machine
    select()  the first that passes the probe (proof.py) too, on every rank

A user's kernel is a file that defines BACKEND. It runs once a process, if the user names it on a
command line or in a config; a path read from a checkpoint or a record is never run.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from types import ModuleType
from typing import Protocol, TypeVar

import torch

from . import flash, flex, manual, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .caps import Backend, BackendUnavailable, Refusal, version
from .machine.apart import apart
from .machine.system import KERNEL_ERRORS, first_line, settings_stay
from .proof import LONG, Probe, Proof, probe, probe_long
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")
T = TypeVar("T")
Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each

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
RULES = ("auto", "fastest")  # they choose a kernel, by PREFERENCE or by timing (plan.py)
_BY_ANY_NAME = {n: b for b in BACKENDS.values() for n in (b.name, *b.aliases)}


@dataclass(frozen=True)
class Resolution:
    """The backend that will run, and those refused before it, with the reasons."""

    requested: str
    backend: Backend
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()  # kernels that the profiler saw in the probe; empty: not probed
    proof: Proof | None = None  # None: not probed
    note: str = ""  # a warning
    traced: bool = False  # chosen while torch.compile traces, by declared Caps alone
    length: int = 0  # keys of the longest probe

    def warnings(self) -> list[str]:
        """One text for each refused backend, with its reasons; then the note."""
        lines = []
        for name, after in pairwise([*self.rejected, self.backend.name]):
            named = name == next(iter(self.rejected)) and self.requested not in RULES
            verb = "requested but " if named else "refused: "
            why = "; ".join(self.rejected[name])
            lines.append(f"{name} {verb}{why}.\nFalling back to '{after}'.")
        return lines + [self.note] * bool(self.note)

    def info(self) -> str:
        kernels = f"; kernel: {', '.join(self.kernels)}" if self.kernels else ""
        if self.traced:
            kernels = "; not proved: chosen in a trace; model.plan(compiled=True) proves it"
        return f"Attention backend: {self.backend.name} ({self.backend.title}{kernels})"

    def __str__(self) -> str:
        warned = ["WARNING: " + w.replace("\n", "\n         ") for w in self.warnings()]
        return "\n".join([*warned, "INFO: " + self.info()])


# --- names and files ---


def is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or bool(os.altsep and os.altsep in name)


def get(name: str) -> Backend:
    """The backend with that name or alias. A file is run.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: the file does not define a valid backend.
    """
    if is_file(name):
        return load(os.path.abspath(name))
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


@cache
def load(path: str) -> Backend:
    """Run the file at an absolute path and return its BACKEND.

    Raises:
        BackendUnavailable: the file is missing or raises, or its BACKEND is not valid.
    """

    def invalid(why: str) -> BackendUnavailable:
        return BackendUnavailable(f"attention kernel {path!r} cannot be used: {why}")

    if not os.path.isfile(path):
        raise invalid("a folder" if os.path.isdir(path) else "no such file")
    try:
        backend = getattr(execute(path), "BACKEND", None)
    except KERNEL_ERRORS as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        hint = "; import nanoattn instead" if getattr(e, "name", "") == "attention" else ""
        at = f"line {line}: " if line else ""
        raise invalid(f"{at}{type(e).__name__}: {first_line(e)}{hint}") from e
    if not isinstance(backend, Backend):
        raise invalid("it defines no BACKEND = Backend(...)")
    if taken := {backend.name, *backend.aliases} & {*_BY_ANY_NAME, *RULES}:
        raise invalid(f"its name {min(taken)!r} is taken")
    if not (backend.fallback is None or backend.fallback in _BY_ANY_NAME):
        raise invalid(f"its fallback {backend.fallback!r} is not a backend")
    return backend


def execute(path: str) -> ModuleType:
    # In sys.modules, as dataclasses, Triton and torch.compile expect.
    name = f"nanoattn_kernel_{load.cache_info().misses}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    with settings_stay():
        spec.loader.exec_module(module)
    return module


def packages(*names: str) -> tuple[str, ...]:
    """The import names of all packages that the backends need, including files in `names`."""
    backends = [*BACKENDS.values(), *(get(name) for name in names if is_file(name))]
    rows = (c for b in backends for c in (*b.caps, *(b.prebuilt.caps if b.prebuilt else ())))
    return tuple(dict.fromkeys(p.partition(">=")[0] for c in rows for p in c.packages))


# --- resolve: by what is declared ---

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
        if spec.alibi:  # sdpa stores the bias of all pairs
            before("triton", "sdpa")
            before("flash_attn_2", "triton")
    elif machine.bfloat16_units and spec.grad and not spec.compiled:
        order.insert(0, "sdpa_bmm")  # a faster backward, which Dynamo does not trace
    return order


def metal_bug(spec: Spec, machine: Machine) -> list[Refusal]:
    """The known bug of PyTorch's SDPA on Apple's Metal that this request meets, if any."""
    release, half = version(machine.torch), spec.dtype in ("float16", "bfloat16")
    bugs = {  # those of pytorch/pytorch that the probe may miss, or that depend on what ran before
        "half precision sees up to three later tokens (issue 195910)": half,
        "a scale may be that of an earlier call (pull request 184122)": spec.scale is not None,
        "a mask that the heads share is misread (pull request 184180)":
            spec.segments or spec.cache == "static",
    }
    met = [bug for bug, is_met in bugs.items() if is_met and release < (2, 13)]
    where = f"on Apple's Metal torch {machine.torch} is wrong"
    permit = "(newer torch, or --allow_mps_sdpa=True)"
    return [Refusal(f"{where}: {bug} {permit}", "metal") for bug in met[:1]]


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


def candidates(name: str, spec: Spec, machine: Machine, policy: Policy) -> list[str]:
    """The backends to try, in order. Raises ValueError: unknown name, or no valid file."""
    names = preferred(spec, machine)
    if name in RULES:
        return names
    backend = get(name)
    name = name if is_file(name) else backend.name
    after = [backend.fallback] if backend.fallback else []
    return [*dict.fromkeys([name, *after, *names])] if policy.fallback else [name]


def resolve(
    name: str, spec: Spec, machine: Machine, policy: Policy = Policy(),
    failed: Mapping[str, Sequence[str]] = {},
) -> Resolution:
    """Choose the backend that will run, by declared Caps alone.

    Args:
        name: a backend's name, alias or file, or one of RULES.
        failed: backends known not to run here, with the reasons.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: refused, with no fallback left or allowed; lists every reason.
    """

    def refusals(candidate: str) -> Sequence[str]:
        backend, why = admit(candidate, spec, machine, policy)
        return [*why, *failed.get(backend.name, ())]

    names = candidates(name, spec, machine, policy)
    chosen, rejected = first_of(name, names, refusals)
    return Resolution(name, admit(chosen, spec, machine, policy)[0], rejected)


def first_of(
    name: str, names: Sequence[str], refusals: Callable[[str], Sequence[str]]
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The first name without a reason to refuse it, and the refused ones that a user should know
    of: the named one, and those that only the probe refused."""
    refused: dict[str, tuple[str, ...]] = {}
    reported: dict[str, tuple[str, ...]] = {}
    for candidate in names:
        why = refusals(candidate)
        if not why:
            return candidate, reported
        try:
            title = get(candidate).name
        except BackendUnavailable:  # a file that only other ranks can load
            title = candidate
        refused[title] = tuple(map(str, why))
        declared = [w for w in why if isinstance(w, Refusal) and w.kind != "metal"]
        if (candidate == names[0] and name not in RULES) or not declared:
            reported[title] = refused[title]
    reasons = ". ".join(f"{n}: {'; '.join(w)}" for n, w in refused.items())
    raise BackendUnavailable(f"attention backend {name!r} cannot run here. {reasons}")


# --- select: by a run, on all ranks ---


class Ranks(Protocol):
    """Processes that choose together: each calls gather() with its own value."""

    @property
    def rank(self) -> int: ...
    def gather(self, value: T, /) -> list[T]: ...  # of every process, in order of rank


def select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
    shape: Shape | None = None, ranks: Ranks | None = None,
    failed: dict[str, Sequence[str]] | None = None,
) -> Resolution:
    """The first backend for `name` that passes the probe on this machine.

    Args:
        shape: of the call; with more than LONG keys the backend is probed at that shape too.
        ranks: processes that call this together. All take the first backend that each accepts.
        failed: backends that a probe has refused, with the reasons; those of this call are added.
    """
    failed = {} if failed is None else failed
    return apart(device, lambda: _select(name, spec, device, policy, shape, ranks, failed))


def _select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy, shape: Shape | None,
    ranks: Ranks | None, failed: dict[str, Sequence[str]],
) -> Resolution:
    if torch.device(device).type == "meta":  # shapes only
        return Resolution(name, manual.BACKEND)
    machine, tried = Machine.here(str(device)), Probe()
    long = shape is not None and shape[2] > LONG

    def refusals(candidate: str) -> Sequence[str]:
        """Every reason against the backend, of this process."""
        nonlocal tried
        try:
            backend, why = admit(candidate, spec, machine, policy)
        except BackendUnavailable as e:  # a file
            return [str(e)]
        if found := [*why, *failed.get(backend.name, ())]:
            return found
        tried = probe(backend, spec, device)
        reasons = tried.why
        if shape and long and not reasons and backend.name not in REFERENCES:
            reasons = probe_long(backend, spec, device, shape)
        if reasons:
            failed[backend.name] = reasons
        return reasons

    def of_all(candidate: str) -> Sequence[str]:
        return by_rank(gather(ranks, refusals(candidate)))

    names, error = list[str](), ""
    try:
        names = candidates(name, spec, machine, policy)
    except BackendUnavailable as e:
        error = str(e)
    proposals = gather(ranks, (names, error))
    if all(error for _, error in proposals):
        raise BackendUnavailable(error)
    names = next(names for names, error in proposals if not error)  # rank 0's, if it has any
    found, rejected = first_of(name, names, of_all)
    backend = admit(found, spec, machine, policy)[0]
    note = math_note(backend, spec, shape) if "math" in tried.kernels else ""
    length = shape[2] if shape and long else 0
    chosen = Resolution(name, backend, rejected, tried.kernels, tried.proof, note, length=length)
    warn(chosen)
    return chosen


def gather(ranks: Ranks | None, value: T) -> list[T]:
    return [value] if ranks is None else ranks.gather(value)


def by_rank(answers: Sequence[Sequence[str]]) -> Sequence[str]:
    """The reasons of all ranks, with the ranks that gave each; without if all did."""
    who: dict[str, list[str]] = {}
    for rank, reasons in enumerate(answers):
        for reason in reasons:
            who.setdefault(reason, []).append(str(rank))
    everybody = all(len(ranks) == len(answers) for ranks in who.values())
    if everybody:
        return answers[0]  # as they are: Refusals
    return [
        reason if len(n) == len(answers) else f"rank {', '.join(n)}: {reason}"
        for reason, n in who.items()
    ]


def math_note(backend: Backend, spec: Spec, shape: Shape | None) -> str:
    """A warning if PyTorch's math kernel would store more than 1 GB of scores; else empty."""
    B, Tq, Tk = shape or (0, 0, 0)  # scores and softmax, (B, H, Tq, Tk) each, at least float32
    size = 2 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * Tq * Tk
    if size <= 1e9:
        return ""
    return (
        f"{backend.name} runs PyTorch's math kernel, which stores {size / 1e9:.1f} GB of scores in "
        f"each layer at batch size {B} and {Tk:,} tokens.\n"
        "python -m attention lists why fused kernels refuse; --attention_backend=tiled stores none."
    )


def announce(chosen: Resolution, phase: str = "") -> None:
    """Log the chosen backend and the refused ones, once per process, on rank 0 only."""
    warn(chosen)
    if int(os.environ.get("RANK", "0")) == 0:
        _once(logging.INFO, chosen.info() + phase)


def warn(chosen: Resolution) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        for warning in chosen.warnings():
            _once(logging.WARNING, warning.replace("\n", "\n         "))


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)


