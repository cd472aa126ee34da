"""The attention contract: what may be asked, what a machine has, what a backend can do.

For every query i of head h, over the keys j that it may see (see :func:`visible`):

    out[b,i,h] = sum_j softmax_j( q[b,i,h] . k[b,j,g(h)] / sqrt(D) ) v[b,j,g(h)]

Layout ``(B, T, H, D)``: q ``(B, Tq, H, D)``, k and v ``(B, Tk, Hkv, D)``, out ``(B, Tq, H, D)``.
Query head h reads key/value head ``g(h) = h // (H / Hkv)``, so multi-head, grouped-query and
multi-query attention are one rule. A row that sees no key gives zeros, and zero gradients. A
segment is one run of neighbouring positions, as packed documents and padding are.

This file imports no torch: any machine's decision can be computed, and tested, on any other.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

DTYPES = ("float16", "bfloat16", "float32", "float64")
CACHES = ("none", "dynamic", "static", "paged")
NEEDS_CAPABILITY = "it needs compute capability"
UNKNOWN_VERSION = "unknown version"  # of a package that imports and does not say


def visible(i: Any, j: Any, offset: Any = 0, window: int | None = None,
            seg_i: Any = None, seg_j: Any = None) -> Any:  # fmt: skip
    """Whether query i may see key j: the one definition of masking in this project.

    Causal, aligned bottom-right, so that the last query always meets the last key. With
    ``offset = Tk - Tq`` (here Tq = 3, Tk = 5, and on the right with ``window=2``)::

                k0 k1 k2 k3 k4           k0 k1 k2 k3 k4
            q0   x  x  x  .  .       q0   .  x  x  .  .
            q1   x  x  x  x  .       q1   .  .  x  x  .
            q2   x  x  x  x  x       q2   .  .  .  x  x

    Args:
        i, j: query and key positions, integers or integer tensors that broadcast.
        offset: Tk - Tq.
        window: a query sees at most this many keys, itself included; None is all of them.
        seg_i, seg_j: segment numbers of the query and of the key; only equals see each other.

    Returns:
        bool, or a bool tensor of the broadcast shape.
    """
    seen = j <= i + offset
    if window is not None:
        seen = seen & (j > i + offset - window)
    if seg_i is not None:
        seen = seen & (seg_i == seg_j)
    return seen


@dataclass(frozen=True)
class Spec:
    """What is asked of an attention backend; one Spec holds for all layers of a model.

    Raises:
        ValueError: a value that no backend could ever honour.
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    dtype: str
    window: int | None = None  # keys that a query sees, itself included
    dropout: float = 0.0  # on the attention probabilities
    segments: bool = False  # will `segments` be passed to attend()?
    grad: bool = True  # will backward() be called?
    cache: str = "none"
    compiled: bool = False  # will it run inside torch.compile?
    deterministic: bool = False  # must the backward give the same bits each time?
    page_size: int | None = None  # tokens a page, with cache="paged"
    hub_kernels: bool = False  # may prebuilt kernels be downloaded, and run?

    def __post_init__(self) -> None:
        if self.n_head < 1 or self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head must be a positive multiple of n_kv_head, got n_head={self.n_head}, "
                f"n_kv_head={self.n_kv_head}"
            )
        if self.head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be None or at least 1, got {self.window}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {self.cache!r}")
        if (self.page_size is not None) != (self.cache == "paged"):
            raise ValueError(
                f"page_size belongs to the 'paged' cache, got page_size={self.page_size} and "
                f"cache={self.cache!r}"
            )
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")


@dataclass(frozen=True)
class Policy:
    """What may be done to get a kernel."""

    fallback: bool = True  # go on to the next backend when one is refused; False: an error
    hub_kernels: bool = False  # download a prebuilt kernel, and run it
    mps_sdpa: bool = False  # lift the guard that keeps SDPA off Apple's Metal


@dataclass(frozen=True)
class Machine:
    """What is there: a device and the software around it. Tests describe machines of their own."""

    device: str  # "cuda", "cpu" or "mps"
    name: str  # what the maker calls it, "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] | None = None  # CUDA compute capability
    torch: str = "0"  # version, "2.13.0+cpu"
    cuda: str | None = None  # the CUDA version that torch was built with
    packages: Mapping[str, str] = field(default_factory=dict)
    # ^ import name -> version, or the text of the error that its import gave; a missing name is
    #   not installed.
    interpreted: bool = False  # do Triton kernels run in Triton's interpreter, on the CPU?
    deterministic: bool = False  # is torch.use_deterministic_algorithms(True) on?

    @classmethod
    def here(cls, device: str, packages: Iterable[str] = ()) -> Machine:
        """Read this machine.

        Args:
            device: a torch device, "cuda", "cuda:1", "cpu" or "mps".
            packages: import names to look for. Each that is installed is imported, since a
                package that is there may still not load.
        """
        import torch

        kind = torch.device(device).type
        capability = None
        name = platform.processor() or platform.machine()
        if kind == "cuda":
            name = torch.cuda.get_device_name(device)
            capability = torch.cuda.get_device_capability(device)
        elif kind == "cpu":
            name = cpu_name() or name
        found = {p: v for p in packages if (v := _import_version(p)) is not None}
        return cls(
            kind,
            name,
            capability,
            torch.__version__,
            torch.version.cuda,
            found,
            interpreted=os.environ.get("TRITON_INTERPRET") == "1",
            deterministic=torch.get_deterministic_debug_mode() == 2,  # 1 only warns
        )


def cpu_name() -> str | None:
    """The processor's name as the kernel reports it, None where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            found = re.search(r"^model name\s*:\s*(.+)$", f.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def _import_version(package: str) -> str | None:
    """A package's version, the text of its import error, or None if it is not installed."""
    import importlib
    import importlib.util

    try:
        found = importlib.util.find_spec(package)
        if found is None or (found.origin is None and found.submodule_search_locations is not None):
            return None  # at most a namespace: flash-attn-4 alone leaves an empty flash_attn
        module = importlib.import_module(package)
    except Exception as e:  # a broken binary can raise anything; its own words are the answer
        if isinstance(e, ModuleNotFoundError) and f"{package}.".startswith(f"{e.name}."):
            return None  # "a.b", and there is no a
        return f"{type(e).__name__}: {e}"
    said = str(getattr(module, "__version__", ""))
    if any(version(said)):
        return said
    # Nothing said, or the 0.0.0 of a package that looks itself up under a name it no longer has.
    return _distribution_version(package) or UNKNOWN_VERSION


def _distribution_version(package: str) -> str | None:
    """The version of the distribution that put the package there, None where none says so."""
    from importlib import metadata

    path = package.replace(".", "/")
    for name in metadata.packages_distributions().get(package.partition(".")[0], ()):
        files = {str(file) for file in metadata.files(name) or ()}
        if files & {f"{path}.py", f"{path}/__init__.py"}:
            return metadata.version(name)
    return None


def dotted(capability: tuple[int, int] | None) -> str:
    """(9, 0) as people write it: "9.0"."""
    return "{}.{}".format(*capability) if capability else "none"


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in leading.group().split(".")) if leading else ()


@dataclass(frozen=True)
class Caps:
    """What a backend can do on some devices, as data.

    The defaults promise all but a static or paged cache.
    """

    devices: tuple[str, ...] = ("cuda", "cpu", "mps")
    dtypes: tuple[str, ...] = DTYPES
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None  # the last that it knows
    min_torch: str | None = None
    head_dim_max: int | None = None
    head_dim_multiple: int = 1
    window: bool = True
    dropout: bool = True
    dropout_step: float | None = None  # dropout must be a multiple of this
    segments: bool = True
    grad: bool = True
    deterministic: bool = True
    deterministic_switch: bool = False  # ... under torch.use_deterministic_algorithms(True) only
    caches: tuple[str, ...] = ("none", "dynamic")
    page_multiple: int = 1  # page_size must be a multiple of this
    packages: tuple[str, ...] = ()  # import names, each with a least version if need be: "a>=2.1"
    hub_kernels: bool = False  # takes its kernels from the hub: only for a Spec that allows it
    interpreted: bool = False  # only in Triton's interpreter

    def why_not(self, spec: Spec, machine: Machine) -> list[str]:
        """Every reason why this cannot do `spec` on `machine`; empty means that it can."""
        why = []
        if machine.device not in self.devices:
            why.append(f"it runs on {' and '.join(self.devices)}, not on {machine.device}")
        if self.min_torch and version(machine.torch) < version(self.min_torch):
            why.append(f"it needs torch >= {self.min_torch}, this is {machine.torch}")
        if self.interpreted and not machine.interpreted:
            why.append(
                f"it runs on {machine.device} in Triton's interpreter only, which is slow and for "
                "tests (TRITON_INTERPRET=1)"
            )
        for package, least in (p.partition(">=")[::2] for p in self.packages):
            found = machine.packages.get(package)
            if found is None:
                why.append(f"package '{package}' is not installed")
            elif not version(found) and found != UNKNOWN_VERSION:
                why.append(f"package '{package}' is installed but does not import ({found})")
            elif least and version(found) and version(found) < version(least):
                why.append(f"package '{package}' must be >= {least}, this is {found}")
        if self.hub_kernels and not spec.hub_kernels:
            why.append("it may not download a kernel (--attention_hub_kernels=True)")
        low, high = self.min_capability, self.max_capability
        if low and high and not low <= (machine.capability or (0, 0)) <= high:
            need = dotted(low) + (f" to {dotted(high)}" if high != low else "")
            why.append(
                f"{NEEDS_CAPABILITY} {need}, {machine.name} has {dotted(machine.capability)}"
            )
        elif low and (machine.capability or (0, 0)) < low:
            why.append(
                f"{NEEDS_CAPABILITY} >= {dotted(low)}, {machine.name} has "
                f"{dotted(machine.capability)}"
            )
        if spec.dtype not in self.dtypes:
            takes = " and ".join(self.dtypes)
            why.append(f"it takes {takes}, not {spec.dtype} (--dtype={self.dtypes[-1]})")
        if self.head_dim_max and spec.head_dim > self.head_dim_max:
            why.append(f"it takes a head_dim up to {self.head_dim_max}, not {spec.head_dim}")
        if spec.head_dim % self.head_dim_multiple:
            why.append(
                f"head_dim must be a multiple of {self.head_dim_multiple}, not {spec.head_dim}"
            )
        if spec.window is not None and not self.window:
            why.append("it has no sliding window")
        if spec.segments and not self.segments:
            why.append("it has no segments (packed or padded sequences)")
        if spec.dropout and not self.dropout:
            why.append(f"it has no dropout, and {spec.dropout:g} is asked (--dropout=0)")
        elif spec.dropout and self.dropout_step and spec.dropout % self.dropout_step:
            why.append(f"dropout must be a multiple of {self.dropout_step:g}, not {spec.dropout:g}")
        if spec.grad and not self.grad:
            why.append("it has no backward pass")
        fixed = self.deterministic and (machine.deterministic or not self.deterministic_switch)
        if spec.deterministic and spec.grad and not fixed:
            switch = " unless torch.use_deterministic_algorithms(True) is called first"
            why.append(
                f"its backward pass adds up in no fixed order{switch * self.deterministic} "
                "(--attention_deterministic)"
            )
        if spec.cache not in self.caches and spec.cache == "none":
            why.append(f"it only reads a {' or '.join(self.caches)} cache (--kv_cache)")
        elif spec.cache not in self.caches:
            why.append(f"it has no '{spec.cache}' cache")
        elif spec.page_size and spec.page_size % self.page_multiple:
            why.append(
                f"page_size must be a multiple of {self.page_multiple}, not {spec.page_size}"
            )
        return why


@dataclass(frozen=True)
class Backend:
    """One attention kernel.

    ``attend(q, k, v, spec, *, segments=None, cache=None) -> out`` takes q ``(B, Tq, H, D)``, k
    and v ``(B, Tk, Hkv, D)``, segments ``(B, Tk)`` int32 whose last Tq positions are the
    queries', and gives out ``(B, Tq, H, D)`` in q's dtype. With a cache k and v are
    this call's own ``(B, Tq, Hkv, D)``: they are stored, and q sees all that was stored.
    """

    name: str
    title: str
    attend: Callable[..., Any]
    caps: tuple[Caps, ...]  # a row for each group of devices and dtypes that it treats alike
    fallback: str | None  # the next name to try
    aliases: tuple[str, ...] = ()
    install: str | None = None  # the command that would get it
    fullgraph: bool = True  # does torch.compile take the call into the model's graph?

    def why_not(self, spec: Spec, machine: Machine) -> list[str]:
        """Every reason why this cannot do `spec` on `machine`; empty means that it can.

        Of several rows of caps, the one for this device that comes nearest speaks.
        """
        rows = [c for c in self.caps if machine.device in c.devices]
        if not rows:
            devices = dict.fromkeys(d for c in self.caps for d in c.devices)
            return [f"it runs on {' and '.join(devices)}, not on {machine.device}"]
        # Of equals, the one that can be mended: a dtype rather than another GPU.
        refusals = [c.why_not(spec, machine) for c in rows]
        why = min(refusals, key=lambda why: (len(why), any(NEEDS_CAPABILITY in w for w in why)))
        help_ = f" ({self.install})" if self.install else ""
        return [w + help_ if w.startswith("package ") else w for w in why]


class BackendUnavailable(ValueError):
    """No backend that was allowed can do what was asked."""


@dataclass(frozen=True)
class Resolution:
    """Which backend will run, and every name that was refused on the way, with the reasons."""

    requested: str
    backend: Backend
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()  # what ran in the probe, by the profiler; empty: not probed
    note: str = ""  # a warning about what will run

    def warnings(self) -> list[str]:
        """One text for each refused name: every reason, what would mend it, what is tried next.

        Then the note, if there is one.
        """
        names = [*self.rejected, self.backend.name]
        lines = []
        for name, after in pairwise(names):
            named = name == names[0] and self.requested not in ("auto", "fastest")
            asked = "requested but " if named else "refused: "
            why = "; ".join(self.rejected[name])
            lines.append(f"{name} {asked}{why}.\nFalling back to '{after}'.")
        return lines + [self.note] * bool(self.note)

    def info(self) -> str:
        """The one line that says what will run."""
        kernels = f"; kernel: {', '.join(self.kernels)}" if self.kernels else ""
        return f"Attention backend: {self.backend.name} ({self.backend.title}{kernels})"

    def __str__(self) -> str:
        """The lines that a user sees."""
        warned = ["WARNING: " + w.replace("\n", "\n         ") for w in self.warnings()]
        return "\n".join([*warned, "INFO: " + self.info()])
