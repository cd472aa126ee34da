"""The choice of a backend, with the reasons to refuse others: resolve() takes the first candidate
whose declared Caps admit the request, select() the first that also passes the probe on every rank.
NANOATTN_DISABLE=name,name in the environment refuses backends, for launchers."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from . import hub, manual
from .caps import Backend, BackendUnavailable, Refusal, version
from .machine.apart import apart
from .names import RULES, get, is_backend, is_code
from .proof import LONG, Probe, Proof, probe, probe_long
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")
T = TypeVar("T")
Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each

DISABLE = "NANOATTN_DISABLE"
ALWAYS = ("metal", "disabled")  # kinds of refusals that are always reported
REFERENCES = ("manual", "sdpa_math")  # O(T^2) memory, and no tiles: not probed at length


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

    def as_json(self) -> dict[str, Any]:
        names = "requested", "kernels", "proof", "note", "traced"
        backend = {"backend": self.backend.name, "title": self.backend.title}
        return backend | {n: getattr(self, n) for n in names} | {"rejected": dict(self.rejected)}


# --- the candidates ---

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
        if major == 8:  # 1.39 times sdpa with windows on A100s (nanochat pull request 540)
            before("flash_attn_3", "flash_attn_2")
        if spec.window is not None or spec.segments:  # it skips tiles, sdpa takes a mask
            before("sdpa_flash", "sdpa")
            # sdpa_flash takes windows from 2.12 on, and by segments it breaks a compiled graph.
            if spec.compiled or version(machine.torch) < (2, 12):
                before("triton", "sdpa_flash")
        if spec.cache == "static":  # it splits the keys, sdpa's mask leaves most of the GPU idle
            before("paged", order[0])
        if spec.alibi:  # sdpa stores the bias of all pairs
            before("triton", "sdpa")
            before("flash_attn_2", "triton")
    elif machine.bfloat16_units and spec.grad and not spec.compiled:
        order.insert(0, "sdpa_bmm")  # a faster backward, which Dynamo does not trace
    return order


def candidates(name: str, spec: Spec, machine: Machine, policy: Policy) -> list[str]:
    """The backends to try, in order. Raises ValueError: unknown name, or no valid file."""
    names = preferred(spec, machine)
    if name in RULES:
        return names
    backend = get(name)
    name = name if is_code(name) else backend.name
    if backend.mods is not None or not policy.fallback:  # another kernel has another mask
        return [name]
    return [*dict.fromkeys([name, backend.fallback or name, *names])]


def metal_bug(spec: Spec, machine: Machine) -> list[Refusal]:
    """The known bug of PyTorch's SDPA on Apple's Metal that this request meets, if any."""
    bugs = {  # those of pytorch/pytorch that the probe may miss, or that depend on what ran before
        "half precision sees up to three later tokens (issue 195910)":
            spec.dtype in ("float16", "bfloat16"),
        "a scale may be that of an earlier call (pull request 184122)": spec.scale is not None,
        "a mask that the heads share is misread (pull request 184180)":
            spec.segments or spec.cache == "static",
    }
    met = [f"on Apple's Metal torch {machine.torch} is wrong: {bug} (newer torch, or "
           "--allow_mps_sdpa=True)" for bug, is_met in bugs.items() if is_met]
    return [Refusal(bug, "metal") for bug in met[:1] if version(machine.torch) < (2, 13)]


def disabled() -> set[str]:
    """The names in NANOATTN_DISABLE."""
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def admit(name: str, spec: Spec, machine: Machine,
          policy: Policy = Policy()) -> tuple[Backend, list[Refusal]]:
    """The backend of that name, or its prebuilt kernel if allowed, and every reason why it cannot
    run `spec` on `machine`; empty if it can."""
    backend = get(name)
    family = name.partition(":")[0]  # triton, of triton:dq64-dkdv128
    if disabled() & {name, family, backend.name, *backend.aliases}:
        value = os.environ[DISABLE]
        return backend, [Refusal(f"it is disabled by {DISABLE}={value}", "disabled")]
    if name.startswith(hub.PREFIX):
        return hub.admit(name, spec, machine, policy)
    if policy.hub_kernels and backend.prebuilt and not backend.prebuilt.why_not(spec, machine):
        return backend.prebuilt, []
    why = backend.why_not(spec, machine)
    on_metal = machine.device == "mps" and backend.name in ("sdpa", "sdpa_math")
    return backend, why + metal_bug(spec, machine) if on_metal and not policy.mps_sdpa else why


# --- the loop of proposals ---


class Ranks(Protocol):
    """Processes that choose together: each calls gather() with its own value."""

    @property
    def rank(self) -> int: ...
    def gather(self, value: T, /) -> list[T]: ...  # of every process, in order of rank


def gather(ranks: Ranks | None, value: T) -> list[T]:
    return [value] if ranks is None else ranks.gather(value)


def first_accepted(
    name: str, spec: Spec, machine: Machine, policy: Policy,
    failed: MutableMapping[str, Sequence[str]],
    prove: Callable[[Backend], Probe] = lambda backend: Probe(), ranks: Ranks | None = None,
) -> Resolution:
    """Rank 0 proposes a candidate, all ranks admit and prove it, and their reasons are gathered:
    until there are none. What a user should know of is reported: the reasons against the named
    backend, and those of a proof. `failed` receives the latter."""
    names, error = list[str](), ""
    try:
        names = candidates(name, spec, machine, policy)
    except BackendUnavailable as e:  # a file, which other ranks may be able to load
        error = str(e)
    proposals = next((n for n in gather(ranks, names) if n), None)
    if proposals is None:
        raise BackendUnavailable(error)
    refused: dict[str, tuple[str, ...]] = {}
    rejected: dict[str, tuple[str, ...]] = {}
    for candidate in proposals:
        title, why, proved = candidate, list[str](), Probe()
        try:
            backend, declared = admit(candidate, spec, machine, policy)
            title, why = backend.name, [*declared, *failed.get(backend.name, ())]
        except BackendUnavailable as e:
            why = [str(e)]
        if not why:
            proved = prove(backend)
            why = [*proved.why]
            failed.update({title: proved.why} if why else {})
        reasons = by_rank(gather(ranks, why))
        if not reasons:
            return Resolution(name, backend, rejected, proved.kernels, proved.proof)
        refused[title] = tuple(map(str, reasons))
        known = any(isinstance(why, Refusal) and why.kind not in ALWAYS for why in reasons)
        if not known or (candidate == proposals[0] and name not in RULES):
            rejected[title] = refused[title]
    text = ". ".join(f"{n}: {'; '.join(reasons)}" for n, reasons in refused.items())
    raise BackendUnavailable(f"attention backend {name!r} cannot run here. {text}")


def by_rank(answers: Sequence[Sequence[str]]) -> list[str]:
    """The reasons of all ranks, with the ranks that gave each, unless all did."""
    who: dict[str, list[str]] = {}
    for rank, reasons in enumerate(answers):
        for reason in reasons:
            who.setdefault(reason, []).append(str(rank))
    return [reason if len(n) == len(answers) else f"rank {', '.join(n)}: {reason}"
            for reason, n in who.items()]


def resolve(name: str, spec: Spec, machine: Machine, policy: Policy = Policy(),
            failed: Mapping[str, Sequence[str]] = {}) -> Resolution:
    """Choose the backend that will run, by declared Caps alone. `name` is a backend's, an alias, a
    file or one of RULES; `failed` are known not to run here, with the reasons. Raises
    ValueError: unknown name. BackendUnavailable: refused, no fallback is left or allowed."""
    return first_accepted(name, spec, machine, policy, dict(failed))


def select(name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
           shape: Shape | None = None, ranks: Ranks | None = None,
           failed: MutableMapping[str, Sequence[str]] | None = None) -> Resolution:
    """The first backend for `name` that passes the probe on this machine.

    Args:
        shape: of the call; with more than LONG keys the backend is probed at that shape too.
        ranks: processes that call this together. All take the first backend that each accepts.
        failed: backends that a probe has refused, with the reasons; those of this call are added.
    """
    if torch.device(device).type == "meta":  # shapes only
        return Resolution(name, manual.BACKEND)
    failed = {} if failed is None else failed
    long = shape if shape and shape[2] > LONG else None

    def prove(backend: Backend) -> Probe:
        proved = probe(backend, spec, device)
        if long and not proved.why and backend.name not in REFERENCES:
            return replace(proved, why=probe_long(backend, spec, device, long))
        return proved

    def choose() -> Resolution:
        machine = Machine.here(str(device))
        chosen = first_accepted(name, spec, machine, policy, failed, prove, ranks)
        notes = [math_note(chosen, spec, shape)] if "math" in chosen.kernels else []
        notes += [f"{DISABLE} names {word!r}, which is not a backend."
                  for word in sorted(disabled()) if not is_backend(word)]
        note = "\n".join(filter(None, notes))
        chosen = replace(chosen, note=note, length=long[2] if long else 0)
        announce(chosen)
        debug(chosen, spec, machine, policy)
        return chosen

    return apart(device, choose)


# --- what a user sees ---


def math_note(chosen: Resolution, spec: Spec, shape: Shape | None) -> str:
    """A warning if PyTorch's math kernel would store more than 1 GB of scores; else empty."""
    B, Tq, Tk = shape or (0, 0, 0)  # scores and softmax, (B, H, Tq, Tk) each, at least float32
    size = 2 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * Tq * Tk
    if size <= 1e9:
        return ""
    return (f"{chosen.backend.name} runs PyTorch's math kernel, which stores {size / 1e9:.1f} GB "
            f"of scores in each layer at batch size {B} and {Tk:,} tokens.\npython -m attention "
            "lists why fused kernels refuse; --attention_backend=tiled stores none.")


def configuration(spec: Spec, machine: Machine, policy: Policy,
                  packages: Sequence[str] = ()) -> dict[str, Any]:
    """All that a choice depends on, for JSON."""
    versions = {"nanoattn": sys.modules[__name__.partition(".")[0]].__version__,
                "torch": machine.torch, "cuda": machine.cuda, "python": platform.python_version()}
    versions |= {package: machine.version_of(package) for package in packages}
    return {
        "versions": versions, "device": machine.device, "name": machine.name,
        "capability": machine.capability, "deterministic": machine.deterministic,
        "layout": "q (B, Tq, H, D), k and v (B, Tk, Hkv, D)", "spec": asdict(spec),
        "policy": asdict(policy), DISABLE: sorted(disabled())}


def debug(chosen: Resolution, spec: Spec, machine: Machine, policy: Policy) -> None:
    """Log a choice and its whole configuration, one line of JSON, at the level DEBUG."""
    if log.isEnabledFor(logging.DEBUG):
        needed = [r.package for caps in chosen.backend.caps for r in caps.requirements]
        content = chosen.as_json() | configuration(spec, machine, policy, needed)
        log.debug("chosen: %s", json.dumps(content))


def announce(chosen: Resolution, info: str = "") -> None:
    """Log the warnings of a choice, and `info`, once per process, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        for warning in chosen.warnings():
            _once(logging.WARNING, warning.replace("\n", "\n         "))
        if info:
            _once(logging.INFO, info)


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)
