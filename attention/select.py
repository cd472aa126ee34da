"""resolve() chooses a backend by Caps, select() also by proof on this machine."""

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

from .caps import Backend, BackendUnavailable, Refusal, version
from .machine.system import KERNEL_ERRORS, apart, first_line
from .names import HUB, RULES, get, is_backend, is_code, loaded
from .proof import LONG, Probe, Proof, probe, probe_long
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")
T = TypeVar("T")
Shape = tuple[int, int, int]  # B, Tq, Tk
Failed = MutableMapping[str, Sequence[str]]  # names refused by proofs, and why

DISABLE = "NANOATTN_DISABLE"  # refused names
REFERENCES = ("manual", "sdpa_math")  # O(T^2) memory: not probed at length
PREFERENCE = {  # order of "auto"; on a CPU flex needs a C++ compiler
    "cuda": ("flash_attn_4", "flash_attn_3", "flash_attn_2", "sdpa", "paged", "sdpa_flash", "flex",
             "triton", "manual", "tiled"),
    "cpu": ("sdpa", "paged", "sdpa_flash", "manual", "tiled"),
    "mps": ("sdpa", "paged", "manual", "tiled"),
}


@dataclass(frozen=True)
class Resolution:
    """The backend that will run, and reasons against others."""

    requested: str
    backend: Backend
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()  # in the probe
    proof: Proof | None = None  # None: not probed
    note: str = ""  # a warning
    traced: bool = False  # by declared Caps alone, in a trace
    length: int = 0  # keys in the longest probe

    def warnings(self) -> list[str]:
        lines = []
        for name, after in pairwise([*self.rejected, self.backend.name]):
            named = name == next(iter(self.rejected)) and self.requested not in RULES
            why = ("requested but " if named else "refused: ") + "; ".join(self.rejected[name])
            lines.append(f"{name} {why}.\nFalling back to '{after}'.")
            if named and self.requested.endswith(".py"):
                lines[-1] += f" To explain it: python -m attention check {self.requested}"
        return lines + [self.note] * bool(self.note)

    def info(self) -> str:
        kernels = f"; kernel: {', '.join(self.kernels)}" if self.kernels else ""
        if self.traced:
            kernels = "; not proved: chosen in a trace; model.plan(compiled=True) proves it"
        return f"Attention backend: {self.backend.name} ({self.backend.title}{kernels})"

    def __str__(self) -> str:
        lines = ["WARNING: " + w.replace("\n", "\n         ") for w in self.warnings()]
        return "\n".join([*lines, "INFO: " + self.info()])

    def as_json(self) -> dict[str, Any]:
        names = "requested", "kernels", "proof", "note", "traced"
        backend = {"backend": self.backend.name, "title": self.backend.title}
        return backend | {n: getattr(self, n) for n in names} | {"rejected": dict(self.rejected)}


def candidates(name: str, spec: Spec, machine: Machine, policy: Policy) -> list[str]:
    if machine.device not in PREFERENCE:
        raise BackendUnavailable(f"no kernel runs on {machine.device}")
    order = [*PREFERENCE[machine.device]]
    if machine.device == "cuda":
        major = (machine.capability or (0, 0))[0]
        masked = spec.window is not None or spec.segments
        untiled = spec.compiled or version(machine.torch) < (2, 12)
        for moved, first, then in (
            (major >= 9, "sdpa", "flash_attn_2"),  # sdpa may take cuDNN's kernel
            # FlashAttention-4 uses instructions of Ampere there.
            (major == 8, "flash_attn_2", "flash_attn_4"), (major == 12, "sdpa", "flash_attn_4"),
            (major == 8, "flash_attn_3", "flash_attn_2"),  # nanochat pull request 540
            (masked, "sdpa_flash", "sdpa"),  # it skips tiles
            # Windows from 2.12 on; segments break its graph.
            (masked and untiled, "triton", "sdpa_flash"),
            (spec.cache == "static", "paged", None),  # it splits the keys
            # sdpa stores the bias of all pairs.
            (spec.alibi, "triton", "sdpa"), (spec.alibi, "flash_attn_2", "triton"),
        ):
            if moved:
                order.remove(first)
                order.insert(order.index(then) if then else 0, first)
    elif machine.bfloat16_units and spec.grad and not spec.compiled:
        order.insert(0, "sdpa_bmm")  # a faster backward, not traced
    if name in RULES:
        return order
    backend = get(name)
    name = name if is_code(name) else backend.name
    if backend.mods is not None or not policy.fallback:
        return [name]
    return [*dict.fromkeys([name, backend.fallback or name, *order])]


def disabled() -> set[str]:
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def admit(name: str, spec: Spec, machine: Machine,
          policy: Policy = Policy()) -> tuple[Backend, list[Refusal]]:
    backend = get(name)
    family = name.partition(":")[0]
    if disabled() & {name, family, backend.name, *backend.aliases}:
        return backend, [Refusal(f"it is in {DISABLE}={os.environ[DISABLE]}", "disabled")]
    if name.startswith(HUB) and not policy.hub_kernels:
        text = "it is downloaded code, which runs with --attention_hub_kernels=True only"
        return backend, [Refusal(text, "hub")]
    if policy.hub_kernels and backend.prebuilt and not backend.prebuilt.why_not(spec, machine):
        return backend.prebuilt, []
    why = backend.why_not(spec, machine)
    if name.startswith(HUB) and not why and machine.packages is None:
        try:
            backend = loaded(name)
        except KERNEL_ERRORS as e:
            return backend, [Refusal(f"it cannot be loaded ({type(e).__name__}: {first_line(e)})")]
        why = backend.why_not(spec, machine)
    if (machine.device == "mps" and version(machine.torch) < (2, 13) and not policy.mps_sdpa
            and backend.name in ("sdpa", "sdpa_math")):
        for is_met, bug in (  # of pytorch/pytorch; a probe may miss them
            (spec.dtype in ("float16", "bfloat16"),
             "half precision sees up to three later tokens (issue 195910)"),
            (spec.scale is not None, "a scale may be that of an earlier call (pull 184122)"),
            (spec.segments or spec.cache == "static",
             "a mask that the heads share is misread (pull 184180)"),
        ):
            if is_met:
                text = f"torch {machine.torch} is wrong on Apple's Metal: {bug}"
                return backend, [*why, Refusal(f"{text} (--allow_mps_sdpa=True)", "metal")]
    return backend, why


class Ranks(Protocol):
    """Processes that choose together."""

    @property
    def rank(self) -> int: ...
    def gather(self, value: T, /) -> list[T]: ...  # in order of rank


def gather(ranks: Ranks | None, value: T) -> list[T]:
    return [value] if ranks is None else ranks.gather(value)


def resolve(name: str, spec: Spec, machine: Machine, policy: Policy = Policy(),
            failed: Failed | None = None, *, prove: Callable[[Backend], Probe] | None = None,
            ranks: Ranks | None = None) -> Resolution:
    """The first backend that all ranks admit by Caps and `prove`; rank 0 proposes. It reports
    reasons against the named backend and undeclared ones; `failed` holds those of proofs.

    Raises ValueError: unknown name; BackendUnavailable: no fallback is left or allowed."""
    failed = {} if failed is None else failed
    names: list[str] | BackendUnavailable
    try:
        names = candidates(name, spec, machine, policy)
    except BackendUnavailable as e:  # a file that other ranks may load
        names = e
    proposals = next((n for n in gather(ranks, names) if isinstance(n, list)), None)
    if proposals is None:
        assert isinstance(names, BackendUnavailable)
        raise names
    refused, rejected = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for candidate in proposals:
        title, why, proved = candidate, list[str](), Probe()
        try:
            backend, declared = admit(candidate, spec, machine, policy)
            title, why = backend.name, [*declared, *failed.get(backend.name, ())]
            if prove and not why:
                proved = prove(backend)
                if why := [*proved.why]:
                    failed[title] = why
        except BackendUnavailable as e:
            why = [str(e)]
        answers = gather(ranks, why)
        reasons = []
        for reason in dict.fromkeys(reason for given in answers for reason in given):
            those = [str(rank) for rank, given in enumerate(answers) if reason in given]
            everywhere = len(those) == len(answers)
            reasons.append(reason if everywhere else f"rank {', '.join(those)}: {reason}")
        if not reasons:
            note = "\n".join(f"{DISABLE} names {word!r}, which is not a backend."
                             for word in sorted(disabled()) if not is_backend(word))
            chosen = Resolution(name, backend, rejected, proved.kernels, proved.proof, note)
            if log.isEnabledFor(logging.DEBUG):
                content = configuration(spec, machine, policy, backend.packages)
                log.debug("chosen: %s", json.dumps(chosen.as_json() | content))
            return chosen
        refused[title] = tuple(map(str, reasons))
        known = any(isinstance(w, Refusal) and w.kind not in ("metal", "disabled") for w in reasons)
        if not known or (candidate == proposals[0] and name not in RULES):
            rejected[title] = refused[title]
    text = ". ".join(f"{n}: {'; '.join(reasons)}" for n, reasons in refused.items())
    raise BackendUnavailable(f"attention backend {name!r} cannot run here. {text}")


def select(name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
           shape: Shape | None = None, ranks: Ranks | None = None,
           failed: Failed | None = None) -> Resolution:
    """resolve() and a probe, past LONG keys also at `shape`; `ranks` call it together."""
    long = shape if shape and shape[2] > LONG else None

    def prove(backend: Backend) -> Probe:
        proved = probe(backend, spec, device)
        if long and not proved.why and backend.name not in REFERENCES:
            return replace(proved, why=probe_long(backend, spec, device, long))
        return proved

    def choose() -> Resolution:
        here = Machine.here(str(device))
        chosen = resolve(name, spec, here, policy, failed, prove=prove, ranks=ranks)
        B, Tq, Tk = shape or (0, 0, 0)  # scores and softmax, (B, H, Tq, Tk), at least float32
        GB = 2e-9 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * Tq
        GB *= min(Tk, spec.window or Tk)
        if "math" in chosen.kernels and name != "sdpa_math" and GB > 1:
            text = (f"{chosen.backend.name} runs PyTorch's math kernel, which stores {GB:.1f} GB "
                    "of scores a layer (--attention_backend=tiled: none).")
            chosen = replace(chosen, note="\n".join(filter(None, [chosen.note, text])))
        announce(chosen)
        return chosen

    if torch.device(device).type == "meta":  # shapes only
        chosen = Resolution(name, get("tiled" if spec.lse else "manual"))
    else:
        chosen = apart(device, choose)
    return replace(chosen, length=long[2] if long else 0)


def configuration(spec: Spec, machine: Machine, policy: Policy,
                  packages: Sequence[str] = ()) -> dict[str, Any]:
    versions = {"nanoattn": sys.modules[__name__.partition(".")[0]].__version__,
                "torch": machine.torch, "cuda": machine.cuda, "python": platform.python_version()}
    versions |= {package: machine.version_of(package) for package in packages}
    return {
        "versions": versions, "device": machine.device, "name": machine.name,
        "capability": machine.capability, "deterministic": machine.deterministic,
        "layout": "q (B, Tq, H, D), k and v (B, Tk, Hkv, D)", "spec": asdict(spec),
        "policy": asdict(policy), DISABLE: sorted(disabled())}


def announce(chosen: Resolution, info: str = "") -> None:
    if os.environ.get("RANK", "0") == "0":
        for warning in chosen.warnings():
            _once(logging.WARNING, warning.replace("\n", "\n         "))
        if info:
            _once(logging.INFO, info)


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)
