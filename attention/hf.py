"""hf: every backend here as an attention implementation of `transformers`.

    import attention                                  # installed: import nanoattn
    attention.hf.register()
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="nanoattn:triton")

Two functions stand behind each name. `_make_mask` is called once a forward pass for each kind of
layer. It has transformers build the mask that its own SDPA would get and proves, entry by entry,
that it is causal + window + segments (:func:`prove`). `_attend` is called by every layer; it turns
the layer's arguments into a Spec, has the kernel for it chosen as everywhere here, and runs it. An
argument that it does not know is refused, and so is a mask that is something else.

A model that never calls the second function is found out: when it is built, by its source; at its
first mask, which nothing but `_attend` can read (:class:`Mask`); or by :func:`report`.

transformers is imported by register(), not by this file. docs/HF.md has the limits and the proof.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from .autotune import fastest
from .select import BACKENDS, RULES, announce, get, select
from .spec import BackendUnavailable, Policy, Resolution, Spec
from .views import mask as causal_mask
from .views import not_compiled

PREFIX = "nanoattn:"
# transformers looks for these words in a name, and would then want its own SDPA or flash-attn.
RESERVED = ("sdpa", "flash", "flex_attention", "eager")
# What models hand through to their attention, and what says nothing about the result of it.
NO_REQUEST = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict",
              "output_router_logits", "num_items_in_batch"}  # fmt: skip


def implementation(name: str) -> str:
    """The attn_implementation for a backend's name, alias or rule: "triton" -> "nanoattn:triton".

    In capitals where transformers would read a word of its own: "sdpa" -> "nanoattn:SDPA".
    """
    name = name if name in RULES else get(name).name
    return PREFIX + (name.upper() if any(word in name for word in RESERVED) else name)


def names() -> dict[str, str]:
    """Every backend and rule, and its attn_implementation: {"triton": "nanoattn:triton", ...}."""
    return {name: implementation(name) for name in (*RULES, *BACKENDS)}


def register(extra: Iterable[str] = (), policy: Policy = Policy()) -> None:
    """Make every backend, "auto" and "fastest" an attention implementation of transformers.

    Calling it again is allowed, and changes the policy.

    Args:
        extra: further names that attention.get() knows.
        policy: Policy(fallback=False) makes a refusal an error instead of a warning.

    Raises:
        ImportError: no transformers, or one without AttentionInterface and masking_utils (< 4.53).
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import PreTrainedModel

    for name in (*RULES, *BACKENDS, *extra):
        key = implementation(name)
        attend = not_compiled(partial(_attend, name, policy))
        AttentionInterface.register(key, attend)
        AttentionMaskInterface.register(key, not_compiled(partial(_make_mask, key, sdpa_mask)))
    if not hasattr(PreTrainedModel.__init__, "checks_nanoattn"):
        PreTrainedModel.__init__ = _checked(PreTrainedModel.__init__)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """PreTrainedModel.__init__, refusing models that take the name and never call what it names."""

    @wraps(init)
    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        asked = getattr(config, "_attn_implementation", None)
        if isinstance(asked, str) and asked.startswith(PREFIX):
            if asked not in (known := names().values()) and asked.lower() in names():
                raise ValueError(
                    f"unknown attn_implementation {asked!r}; known: {', '.join(known)}"
                )
            # As transformers itself asks whether an implementation can be set: by the source.
            source = sys.modules.get(type(self).__module__)
            own = [c for c in vars(source).values() if isinstance(c, type)
                   and c.__module__ == type(self).__module__ and "Attention" in c.__name__
                   and issubclass(c, torch.nn.Module)]  # fmt: skip
            if own and not hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
                raise BackendUnavailable(
                    f"{type(self).__name__} cannot run {asked!r}: {own[0].__name__} computes its "
                    "attention itself and never calls a registered implementation"
                )
        init(self, config, *args, **kwargs)

    wrapped.checks_nanoattn = True  # type: ignore[attr-defined]
    return wrapped


# --- masks ---


@dataclass(frozen=True)
class Proof:
    """What a mask was proved to be: causal, bottom-right, over the first `end` keys, and this."""

    end: int
    window: int | None = None
    segments: Tensor | None = None  # (B, end) int32; 0 is padding

    @property
    def effective_window(self) -> int | None:
        return _effective(self.window, self.end)


def _effective(window: int | None, end: int) -> int | None:
    """A window that hides nothing is no request."""
    return window if window is not None and window < end else None


class Mask(Tensor):
    """A proved mask: it has the shape (B, 1, Tq, Tk) and a Proof, but no entries.

    Only `_attend` can read it. A model that would add it to its scores gets an error: that model
    does not hand its attention over.
    """

    proof: Proof
    asked_by: str  # the attn_implementation

    @staticmethod
    def of(proof: Proof, name: str, shape: tuple[int, ...]) -> Mask:
        empty = torch.zeros((), dtype=torch.bool).expand(shape)
        made = empty.as_subclass(Mask)
        made.proof, made.asked_by = proof, name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(func, "__name__", str(func))
        # Its shape and device may be asked for, and it may be moved: what generate() and hooks do.
        if called not in (
            "__get__",
            "dim",
            "size",
            "to",
            "detach",
            "contiguous",
            "clone",
            "as_subclass",
        ):
            name = next(
                a.asked_by for a in (*args, *(kwargs or {}).values()) if isinstance(a, Mask)
            )
            raise BackendUnavailable(
                f"this model does not hand its attention over: it uses the mask of {name!r} itself "
                f"(in {called}), so what runs would be its own attention, with a mask it cannot "
                "read"
            )
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Mask) and isinstance(args[0], Mask):
            seg = args[0].proof.segments
            out.asked_by = args[0].asked_by
            out.proof = replace(args[0].proof, segments=None if seg is None else seg.to(out.device))
        return out


def _make_mask(name: str, sdpa_mask: Callable[..., Any], **asked: Any) -> Mask:
    """What transformers calls for a mask (masking_utils): its own, proved.

    Where it says itself that the mask is causal and nothing else, no mask is built.
    """
    B, Tk = asked["batch_size"], asked["kv_length"]
    Tq = asked["q_length"] if "q_length" in asked else len(asked["cache_position"])
    window = asked.get("local_size")
    # For one query "causal" would mean every key, also those that a static cache has yet to fill.
    skip = asked.pop("allow_is_causal_skip", True) and Tq > 1
    asked.pop("allow_is_bidirectional_skip", None)
    seen = sdpa_mask(**asked, allow_is_causal_skip=skip)
    try:
        proof = Proof(Tq, window) if seen is None else prove(seen, window, _tokens(Tq, **asked))
    except ValueError as e:
        raise BackendUnavailable(f"{name} refuses the mask: {e}") from None
    return Mask.of(proof, name, (B, 1, Tq, Tk))


def _tokens(
    Tq: int, *, attention_mask: Tensor | None = None, cache_position: Tensor | None = None,
    q_offset: Any = 0, kv_offset: int = 0, kv_length: int = 0, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Which queries are tokens and not padding, bool (B, Tq), by the caller's 2-D mask."""
    if attention_mask is None:
        return None
    if cache_position is None:  # transformers 5
        cache_position = torch.arange(Tq, device=attention_mask.device) + q_offset
    missing = kv_offset + kv_length - attention_mask.shape[1]  # a static cache's free places
    return F.pad(attention_mask.bool(), (0, max(0, missing)))[:, cache_position]


def prove(mask: Tensor, window: int | None = None, real: Tensor | None = None) -> Proof:
    """What a mask is in the terms of attention.visible, if it is that exactly.

    Each row of a token is compared entry by entry; nobody reads the outputs of padding, and
    transformers lets it see anything. Costs a few passes over the mask, and waits for the device.

    Args:
        mask: (B or 1, 1, Tq, Tk), True or 0.0 where a query sees a key, False or the least number
            of the dtype where it does not.
        window: that the layer says it has; None: found from the mask, if it has one.
        real: (B, Tq) bool, the queries that are tokens; None: those that see anything.

    Raises:
        ValueError: it is anything else; says where.
    """
    seen = _entries(mask)  # (B, Tq, Tk)
    Tq, Tk = seen.shape[1:]
    real = seen.any(-1) if real is None else real
    # The last key that each query sees tells where the queries stand: i + offset.
    last = Tk - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    last = torch.where(real & seen.any(-1), last, -1) - torch.arange(Tq, device=seen.device)
    offset = max(0, int(last.amax()))
    end = offset + Tq
    if end > Tk:
        i = int(last.amax(0).argmax())
        raise ValueError(f"it is not causal: query {i} of {Tq} sees key {i + offset} of {Tk}")
    seen = seen[:, :, :end]
    beside = seen.diagonal(offset - 1, 1, 2)  # does a query see its neighbour's key?
    beside = F.pad(beside, (Tq - beside.shape[1], 0))  # the very first has none
    ids = torch.where(real, 1 + (~beside).cumsum(1), 0)
    earlier = torch.where(seen[:, 0, :offset], ids[:, :1], 0)  # keys before the first query
    ids = torch.cat([earlier, ids], dim=1).int()
    span = ids[:, : offset + 1]  # of these no neighbour was asked
    holes = ((span[:, :-1] != 0) & (span[:, 1:] == 0)).any()

    wrong = None
    windows: list[int | None] = [window]
    if window is None:
        windows.append(int(seen.sum(-1).amax()) or 1)
    for w in windows:
        for segments in (None, ids):
            same = causal_mask(Tq, end, w, segments, seen.device)[:, 0] == seen
            wrong = ~(same | ~real[:, :, None])
            if not bool(wrong.any()):
                if segments is not None and bool(holes):
                    raise ValueError("there is padding between tokens: a segment must be one run")
                return Proof(end, w, segments)
    assert wrong is not None
    b, i, j = wrong.nonzero()[0].tolist()
    is_, what = seen[b, i, j], f"causal with a window of {window}" if window else "causal"
    raise ValueError(
        f"it is not {what} and segments: in row {b} query {i} {'sees' if is_ else 'misses'} key {j}"
        f" of {end}"
    )


def _entries(mask: Tensor) -> Tensor:
    """A mask (B, 1, Tq, Tk) as bool (B, Tq, Tk)."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"it has shape {tuple(mask.shape)}, not (batch, 1, queries, keys)")
    if mask.dtype == torch.bool:
        return mask[:, 0]
    if not mask.is_floating_point():
        raise ValueError(f"it holds {mask.dtype}, neither bool nor floating point")
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise ValueError("it has entries between 0 and the least number: a bias, not a mask")
    return seen[:, 0]


def _proof(mask: Tensor | None, window: int | None, module: Any, Tq: int, Tk: int) -> Proof:
    """The proof of the mask that a layer got: made before, or made now and kept on the mask."""
    if mask is None:
        # Nothing was said of the mask: only a layer that says that it is causal means that.
        if getattr(module, "is_causal", None) is not True:
            raise ValueError("it has no mask and does not say is_causal")
        if Tq != Tk or _effective(window, Tk) is not None:
            raise ValueError(f"it has no mask for {Tq} queries and {Tk} keys, window {window}")
        return Proof(Tk)
    if isinstance(mask, Mask):
        proof = mask.proof
    else:  # a 4-D mask of the caller's own
        # Kept for the next layer, unless it was written to; inference tensors do not tell.
        key = None if mask.is_inference() else (mask._version, window)
        kept = getattr(mask, "_nanoattn", (None, None))
        proof = kept[1] if kept[0] == key and key is not None else prove(mask, window)
        mask._nanoattn = key, proof  # type: ignore[attr-defined]
    if mask.shape[2] != Tq or proof.end > Tk:
        raise ValueError(f"its mask is {tuple(mask.shape)} for {Tq} queries and {Tk} keys")
    if window is not None and _effective(window, proof.end) != proof.effective_window:
        raise ValueError(f"it has a window of {window}, and its mask {proof.window or 'none'}")
    return proof


# --- the call of a layer ---

_kernels: dict[tuple[Any, ...], Resolution] = {}
_ran: WeakKeyDictionary[torch.nn.Module, dict[Spec, tuple[Resolution, int]]] = WeakKeyDictionary()


def _attend(
    name: str, policy: Policy, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, output_attentions: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of one layer, as AttentionInterface wants it.

    Args:
        query: (B, H, Tq, D); key, value: (B, Hkv, Tk, D).
        is_causal: not asked for: the mask says it, and it was proved.

    Returns:
        (B, Tq, H, D), and None for the weights.

    Raises:
        BackendUnavailable: something that the model asks for cannot be honoured.
    """
    (_, H, Tq, D), (_, Hkv, Tk, _) = query.shape, key.shape
    unknown = [n for n, x in others.items() if x is not None and n not in NO_REQUEST]
    try:
        if unknown:
            raise ValueError(f"it is not known what {', '.join(unknown)} would change")
        if output_attentions:
            raise ValueError("output_attentions: no kernel keeps the weights (use 'eager')")
        if getattr(module, "is_causal", True) is False:
            raise ValueError("the layer is not causal")
        if value.shape != key.shape or query.shape[0] != key.shape[0] or key.shape[3] != D:
            shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
            raise ValueError(f"q, k and v must agree in batch and head_dim: {shapes}")
        proof = _proof(attention_mask, sliding_window, module, Tq, Tk)
        device = query.device
        if torch.is_autocast_enabled(device.type):  # as SDPA does there
            half = torch.get_autocast_dtype(device.type)
            query, key, value = (t.to(half) for t in (query, key, value))
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(f"q, k and v are {query.dtype}, {key.dtype} and {value.dtype}")
        spec = Spec(
            H, Hkv, D, str(query.dtype).removeprefix("torch."),
            window=proof.effective_window, dropout=float(dropout),
            segments=proof.segments is not None,
            grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
            cache="none" if Tq == proof.end else "dynamic", hub_kernels=policy.hub_kernels,
            scale=scaling, softcap=softcap, sinks=s_aux is not None,
        )  # fmt: skip
    except ValueError as e:
        raise BackendUnavailable(
            f"{implementation(name)} refuses {type(module).__name__}: {e}"
        ) from None

    chosen = _choose(name, spec, device, policy, (query.shape[0], Tq, proof.end))
    ran = _ran.setdefault(module, {})
    ran[spec] = chosen, ran.get(spec, (chosen, 0))[1] + 1
    # A static cache is longer than what it holds: the rest is cut off, which copies nothing.
    q_BTHD, k_BTHD, v_BTHD = (
        t.transpose(1, 2)[:, : proof.end] for t in (query, key, value)
    )  # (B, T, H, D)
    options: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    if (segments := proof.segments) is not None:
        options["segments"] = segments.to(device).expand(query.shape[0], -1)
    with torch.autocast(device.type, enabled=False):
        out = chosen.backend.attend(q_BTHD, k_BTHD, v_BTHD, spec, **options)
    return out.contiguous(), None


def _choose(
    name: str, spec: Spec, device: torch.device, policy: Policy, shape: tuple[int, int, int]
) -> Resolution:
    """The kernel for this Spec: chosen, probed and announced once, then kept.

    "fastest" measures at the shape of the first call.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    known = name, spec, device, policy, strict
    if known not in _kernels:
        with torch.autocast(device.type, enabled=False):
            if name == "fastest" and not (spec.grad and shape[1] != shape[2]):
                chosen = fastest(spec, device, shape, policy)
            else:
                chosen = select(name, spec, device, policy, shape=(shape[0], shape[2]))
        where = " with a cache" if spec.cache != "none" else " without gradients"
        announce(chosen, "" if spec.grad else where)
        _kernels[known] = chosen
    return _kernels[known]


# --- what ran ---


@dataclass(frozen=True)
class Layer:
    """An attention layer of a model, and what ran in it."""

    name: str  # "model.layers.0.self_attn"
    ran: tuple[tuple[Spec, Resolution, int], ...]  # what was asked, what ran, and how often

    def __str__(self) -> str:
        lines = []
        for spec, chosen, calls in self.ran:
            asked = [spec.dtype, "training" if spec.grad else "inference"]
            asked += ["cache"] * (spec.cache != "none") + ["segments"] * spec.segments
            asked += [f"{n} {x:g}" for n in ("window", "scale", "softcap", "dropout")
                      if (x := getattr(spec, n))] + ["sinks"] * spec.sinks  # fmt: skip
            kernels = ", ".join(chosen.kernels) or "none of a known name"
            lost = "".join(f"; not {n}: {'; '.join(why)}" for n, why in chosen.rejected.items())
            lines.append(f"{self.name}: {chosen.backend.name} (kernel: {kernels}), {calls} calls, "
                         f"{', '.join(asked)}{lost}")  # fmt: skip
        return "\n".join(lines or [f"{self.name}: NOT CALLED"])


class Report(tuple[Layer, ...]):
    """The layers of a model; prints a line for each layer and each thing that it was asked."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def report(model: torch.nn.Module) -> Report:
    """For each attention layer what ran, and which kernel the profiler saw when it was probed.

    Raises:
        RuntimeError: nothing ran: the model has not been called, or never calls what it accepted.
    """
    found = {n: m for n, m in model.named_modules()
             if m in _ran or re.search("Attention", type(m).__name__)}  # fmt: skip
    inner = [n for n in found if not any(o.startswith(f"{n}.") for o in found)]
    layers = [Layer(n, tuple((s, *x) for s, x in _ran.get(found[n], {}).items())) for n in inner]
    if not any(layer.ran for layer in layers):
        raise RuntimeError(
            f"none of {len(layers)} attention layers of {type(model).__name__} has run through "
            "nanoattn: call the model first; if it was called, it never uses its implementation"
        )
    return Report(layers)
