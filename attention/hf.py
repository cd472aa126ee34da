"""hf: every backend here as an attention implementation of `transformers` (docs/HF.md).

Two functions stand behind each name. `_mask` is called once a forward pass for each kind of layer:
it has transformers build the mask that its own SDPA would get, and proves what it is (hf_mask.py).
`_attend` is called by every layer: it turns the layer's arguments into a Spec, has the kernel for
it chosen as everywhere here, and runs it. What it cannot honour it refuses, and it refuses what it
does not know.

A model that never calls `_attend` is found out: when it is built, by its source; at its first mask,
which nothing else can read; or by :func:`report`. transformers is imported by register() alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from .autotune import fastest
from .flash_impl import flash_impl
from .hf_mask import Mask, Proof, prove
from .select import BACKENDS, RULES, announce, get, select
from .spec import Backend, BackendUnavailable, Policy, Resolution, Spec
from .views import kept

PREFIX = "nanoattn:"
# transformers looks for these words in a name, and then wants its own SDPA or flash-attn.
RESERVED = ("sdpa", "flash", "flex_attention", "eager")
# What models hand through to their attention, and what changes nothing there.
NO_REQUEST = {"cache_position", "use_cache", "output_hidden_states", "return_dict",
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

    It may be called again, with another policy.

    Args:
        extra: further names that attention.get() knows: a kernel file is run here.
        policy: Policy(fallback=False) makes a refusal an error instead of a warning.

    Raises:
        ImportError: no transformers, or one without masking_utils (before 4.53).
        ValueError: two of the names would be one attn_implementation.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import PreTrainedModel
    except ImportError as e:
        text = "it takes transformers >= 4.53 (pip install 'transformers>=4.53')"
        raise ImportError(f"{text}: {e}") from e

    # Both read tensors on the host: in a compiled model each call is a graph break.
    untraced = torch.compiler.disable
    made: dict[str, Backend] = {}
    for name in (*RULES, *BACKENDS, *extra):
        key = implementation(name)
        if name not in RULES and made.setdefault(key.lower(), get(name)) is not get(name):
            raise ValueError(f"{name!r} would be {key!r}, which is another backend's")
        AttentionInterface.register(key, untraced(partial(_attend, name, policy)))
        AttentionMaskInterface.register(key, untraced(partial(_mask, key, sdpa_mask)))
    if not hasattr(PreTrainedModel.__init__, "asks_nanoattn"):
        setattr(PreTrainedModel, "__init__", _asking(PreTrainedModel.__init__))  # noqa: B010


def _asking(init: Callable[..., None]) -> Callable[..., None]:
    """PreTrainedModel.__init__, refusing models that take a name and never call what it names."""

    @wraps(init)
    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        asked = getattr(config, "_attn_implementation", None)
        if isinstance(asked, str) and asked.startswith(PREFIX):
            meant = {key.lower(): key for key in names().values()}.get(asked.lower(), asked)
            if asked != meant:
                raise ValueError(f"unknown attn_implementation {asked!r}: write {meant!r}")
            # transformers itself tells by the source whether an implementation can be set.
            source = vars(sys.modules[type(self).__module__])
            own = [c.__name__ for c in source.values() if isinstance(c, type)
                   and issubclass(c, torch.nn.Module) and "Attention" in c.__name__
                   and c.__module__ == type(self).__module__]  # fmt: skip
            if own and "ALL_ATTENTION_FUNCTIONS" not in source:
                raise BackendUnavailable(
                    f"{type(self).__name__} cannot run {asked!r}: {own[0]} computes its attention "
                    "itself, whatever its attn_implementation is"
                )
        init(self, config, *args, **kwargs)

    wrapped.asks_nanoattn = True  # type: ignore[attr-defined]
    return wrapped


# --- the mask, once a forward pass ---


def _mask(name: str, sdpa_mask: Callable[..., Any], **asked: Any) -> Mask:
    """What masking_utils calls: its mask for SDPA, proved.

    Where it knows itself that the mask is causal and nothing else, none is built.
    """
    B, Tk = asked["batch_size"], asked["kv_length"]
    Tq = asked["q_length"] if "q_length" in asked else len(asked["cache_position"])
    window = asked.get("local_size")
    # For one query "causal" would mean every key, also those that a static cache has yet to fill.
    skip = asked.pop("allow_is_causal_skip", True) and Tq > 1
    asked.pop("allow_is_bidirectional_skip", None)
    seen = sdpa_mask(**asked, allow_is_causal_skip=skip)
    try:
        proof = Proof(Tq, Tq, window) if seen is None else prove(seen, window, _tokens(Tq, **asked))
    except ValueError as e:
        raise BackendUnavailable(f"{name} refuses the mask: {e}") from None
    return Mask.of(proof, name, (B, 1, Tq, Tk))


def _tokens(
    Tq: int, *, attention_mask: Tensor | None = None, cache_position: Tensor | None = None,
    q_offset: Any = 0, kv_offset: int = 0, kv_length: int = 0, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Which queries are tokens and not padding, by the caller's 2-D mask: bool (B, Tq)."""
    if attention_mask is None:
        return None
    if cache_position is None:  # transformers 5
        cache_position = torch.arange(Tq, device=attention_mask.device) + q_offset
    missing = kv_offset + kv_length - attention_mask.shape[1]  # a static cache's free places
    return F.pad(attention_mask.bool(), (0, max(0, missing)))[:, cache_position]


_proved = kept(lambda mask, window: prove(mask, window))


def _proof(
    mask: Tensor | None, window: int | None, is_causal: bool | None, Tq: int, Tk: int
) -> Proof:
    """The proof of the mask that a layer got: made before, or made now and kept with the mask."""
    if mask is None:
        # Eager attention would see everything: only a layer that says so means causal.
        if is_causal is not True or Tq != Tk:
            raise ValueError(f"it has no mask for {Tq} queries and {Tk} keys, or is not causal")
        proof = Proof(Tq, Tk)
    elif isinstance(mask, Mask):
        if not hasattr(mask, "proof"):
            raise ValueError("the model changed the mask")
        proof = mask.proof
    else:  # a 4-D mask of the caller's own
        proof = _proved(mask, window)
    if proof.queries != Tq or proof.end > Tk or (mask is not None and mask.shape[-1] < Tk):
        raise ValueError(f"the mask is for other than {Tq} queries and {Tk} keys")
    if window is not None and proof.effective(window) != proof.effective(proof.window):
        raise ValueError(f"the layer has a window of {window}, its mask {proof.window or 'none'}")
    return proof


def _check_packing(position_ids: Tensor, proof: Proof) -> None:
    """Positions that begin anew are another text, which the mask must separate: not all models
    tell it. position_ids: (B or 1, Tq). Looked at once for each mask, not by every layer."""
    version = None if position_ids.is_inference() else position_ids._version
    # Weak, since positions may be kept for a whole training, and each step has a proof of its own.
    known = [r for r in getattr(position_ids, "_nanoattn", []) if r[0]() is not None]
    if any(r() is proof and v == version for r, v in known):
        return
    begins = position_ids[:, 1:] <= position_ids[:, :-1]
    if proof.segments is not None:
        at = proof.segments[:, -position_ids.shape[1] :].to(position_ids.device)
        begins = begins & (at[:, 1:] == at[:, :-1]) & (at[:, 1:] != 0)
    if bool(begins.any()):
        raise ValueError("position_ids begin anew within a row, and its mask joins the two texts")
    position_ids._nanoattn = [*known, (ref(proof), version)]  # type: ignore[attr-defined]


# --- the call of a layer ---

_kernels: dict[tuple[Any, ...], Resolution] = {}
_ran: WeakKeyDictionary[torch.nn.Module, dict[Spec, tuple[Resolution, int]]] = WeakKeyDictionary()


def _attend(
    name: str, policy: Policy, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, output_attentions: bool | None = None,
    position_ids: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of one layer, as AttentionInterface calls it.

    query is (B, H, Tq, D), key and value (B, Hkv, Tk, D), s_aux, the sinks, (H,), and what it
    returns (B, Tq, H, D), with None for the weights. is_causal stands before the module's, and is
    used where there is no mask: a mask says it itself, and is proved.

    Raises:
        BackendUnavailable: something that the model asks for cannot be honoured.
    """
    (B, H, Tq, D), (_, Hkv, Tk, _) = query.shape, key.shape
    device = query.device
    try:
        if unknown := [n for n, x in others.items() if x is not None and n not in NO_REQUEST]:
            raise ValueError(f"it is not known what {', '.join(unknown)} would change")
        if output_attentions:
            raise ValueError("output_attentions: the weights are not kept (eager has them)")
        if getattr(module, "is_causal", True) is False:
            raise ValueError("the layer is not causal")
        if isinstance(scaling, Tensor) or (s_aux is not None and s_aux.shape != (H,)):
            raise ValueError("scaling must be a number, and s_aux one for each head")
        if scaling is None and getattr(module, "scale_attn_by_inverse_layer_idx", False):
            # GPT-2 until transformers 4.57: only its own eager function reads this.
            raise ValueError("the layer does not pass its scale (scale_attn_by_inverse_layer_idx)")
        if key.shape != value.shape or (key.shape[0], key.shape[3]) != (B, D):
            shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
            raise ValueError(f"q, k and v must agree in batch and head_dim: {shapes}")
        if autocast := torch.is_autocast_enabled(device.type):  # as for SDPA
            half = torch.get_autocast_dtype(device.type)
            low = [t if t.dtype == torch.float64 else t.to(half) for t in (query, key, value)]
            query, key, value = low
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(f"q, k and v are {query.dtype}, {key.dtype} and {value.dtype}")
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        proof = _proof(attention_mask, sliding_window, causal, Tq, Tk)
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == Tq > 1:
            _check_packing(position_ids, proof)
        learned = [t for t in (query, key, value, s_aux) if t is not None and t.requires_grad]
        grad = torch.is_grad_enabled() and bool(learned)
        spec = Spec(
            H, Hkv, D, str(query.dtype).removeprefix("torch."),
            window=proof.effective(proof.window), dropout=float(dropout),
            segments=proof.segments is not None, grad=grad, hub_kernels=policy.hub_kernels,
            cache="none" if grad or Tq == proof.end else "dynamic",
            scale=scaling, softcap=softcap, sinks=s_aux is not None,
        )  # fmt: skip
    except ValueError as e:
        who = f"{implementation(name)} refuses {type(module).__name__}"
        raise BackendUnavailable(f"{who}: {e}") from None

    chosen = _choose(name, spec, device, policy, (B, Tq, proof.end))
    ran = _ran.setdefault(module, {})
    ran[spec] = chosen, ran.get(spec, (chosen, 0))[1] + 1
    # A static cache is longer than what it holds: the rest is cut off, which copies nothing.
    k_BTHD, v_BTHD = (t.transpose(1, 2)[:, : proof.end] for t in (key, value))
    options: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    if proof.segments is not None:
        options["segments"] = proof.segments.to(device).expand(B, -1)
    with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        out = chosen.backend.attend(query.transpose(1, 2), k_BTHD, v_BTHD, spec, **options)
    return out.contiguous(), None


def _choose(
    name: str, spec: Spec, device: torch.device, policy: Policy, shape: tuple[int, int, int]
) -> Resolution:
    """The kernel for this Spec: chosen, probed and announced once, then kept. "fastest" measures at
    the shape (sequences, queries, keys) of the first call."""
    switches = torch.are_deterministic_algorithms_enabled(), flash_impl()
    known = name, spec, device, policy, switches
    if known not in _kernels:
        # What is tried must not become part of the model's graph, as in a checkpointed layer, whose
        # hooks would compute the whole layer again for each tensor that a kernel saves.
        own_graph = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with own_graph, torch.autocast(device.type, enabled=False):
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
            asked += ["with a cache"] * (spec.cache != "none") + ["segments"] * spec.segments
            asked += [f"{n} {x:g}" for n in ("window", "scale", "softcap", "dropout")
                      if (x := getattr(spec, n))] + ["sinks"] * spec.sinks  # fmt: skip
            kernels = ", ".join(chosen.kernels) or "plain operators"
            lost = "".join(f"; {n} refused: {'; '.join(w)}" for n, w in chosen.rejected.items())
            what = f"{chosen.backend.name} (kernel: {kernels})"
            lines.append(f"{self.name}: {what}, {calls} calls, {', '.join(asked)}{lost}")
        return "\n".join(lines) or f"{self.name}: NOT CALLED"


class Report(tuple[Layer, ...]):
    """The attention layers of a model; prints as a line for each thing that each was asked."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def report(model: torch.nn.Module) -> Report:
    """For each attention layer what ran, and which kernel the profiler saw in its probe.

    Raises:
        RuntimeError: nothing ran: the model has not been called, or never calls what it accepted.
    """
    found = {n: m for n, m in model.named_modules() if m in _ran or "Attention" in type(m).__name__}
    inner = [n for n in found if not any(o.startswith(f"{n}.") for o in found)]
    layers = [Layer(n, tuple((s, *x) for s, x in _ran.get(found[n], {}).items())) for n in inner]
    if not any(layer.ran for layer in layers):
        raise RuntimeError(
            f"none of the {len(layers)} attention layers of {type(model).__name__} has run through "
            "nanoattn: call the model first; if it was called, it never calls its implementation"
        )
    return Report(layers)
