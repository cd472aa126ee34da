"""Every backend as an attention implementation of `transformers` (docs/HF.md), which calls `_mask`
once a forward pass and kind of layer, and `_attend` in each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from typing import Any, NamedTuple
from warnings import warn
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ..caps import BackendUnavailable
from ..compat.calls import check_deterministic
from ..machine.system import autocast_dtype
from ..masks import kept, symbolic
from ..names import BACKENDS, RULES, get, is_backend, is_code
from ..plan import Plans
from ..select import Resolution
from ..spec import Policy, Spec
from ..truth import weights
from .mask import Mask, Proof, prove

PREFIX = "nanoattn:"
RESERVED = ("sdpa", "flash", "flex_attention", "eager")  # words that transformers claims
# These do not change attention.
IGNORED = {"cache_position", "use_cache", "output_hidden_states", "return_dict",
           "output_router_logits", "num_items_in_batch", "deterministic"}

_made: dict[str, str] = {}  # registered name -> attn_implementation
_policy = Policy()  # of the last register()


def implementation(name: str) -> str:
    name = name if name in RULES else get(name).name
    return PREFIX + (name.upper() if any(word in name for word in RESERVED) else name)


def names() -> dict[str, str]:
    return {name: implementation(name) for name in (*RULES, *BACKENDS, *_made)}


def register(extra: Iterable[str] = (), policy: Policy = Policy()) -> None:
    """Make backends, rules and `extra` names (files are run) attention implementations. Raises
    ImportError: transformers is older than 4.53; ValueError: two names give one implementation."""
    global _policy
    _policy, known = policy, [*RULES, *BACKENDS, *extra, *_made]
    _made.clear()
    for name in dict.fromkeys(known):
        _add(name)
    _find_when_named()


def _add(name: str) -> str:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    key = implementation(name)
    alike = [other for other, taken in _made.items() if taken.lower() == key.lower()]
    if name not in RULES and any(get(other) is not get(name) for other in alike):
        raise ValueError(f"{name!r} would be {key!r}, the name of another backend")
    _made[name] = key
    untraced = torch.compiler.disable  # both read tensors on the host
    AttentionInterface.register(key, untraced(partial(_attend, Plans(name, _policy))))
    AttentionMaskInterface.register(key, untraced(partial(_mask, key, sdpa_mask)))
    return key


@cache
def _find_when_named() -> None:
    """Let transformers 5 take our names in any case, and files, but not from a config.json."""
    from transformers import PretrainedConfig, PreTrainedModel

    model: Any = PreTrainedModel
    config: Any = PretrainedConfig
    if not hasattr(model, "get_correct_attn_implementation"):
        return
    check, read = model.get_correct_attn_implementation, config.get_config_dict.__func__

    @wraps(check)
    def with_ours(self: object, requested: str | None, *args: object, **kwargs: object) -> str:
        known = {key.lower(): key for key in _made.values()}
        if requested and requested.lower() in known:
            requested = known[requested.lower()]
        elif requested and requested.lower().startswith(PREFIX):
            name = requested[len(PREFIX) :]
            name = name if is_backend(name) else name.lower()
            if not is_backend(name):
                use = ", ".join(known.values())
                raise ValueError(f"attn_implementation={requested!r} is unknown; use {use}")
            name = name if is_code(name) else get(name).name  # of an alias
            requested = _made.get(name) or _add(name)
        return check(self, requested, *args, **kwargs)

    @wraps(read)
    def without_code(cls: object, *args: object, **kwargs: object) -> tuple[Any, Any]:
        content, rest = read(cls, *args, **kwargs)
        _drop_code(content)
        return content, rest

    model.get_correct_attn_implementation = with_ours
    config.get_config_dict = classmethod(without_code)


def _drop_code(config: dict[str, Any]) -> None:
    for key, value in [*config.items()]:
        if key.endswith("attn_implementation"):
            words = map(str, value.values() if isinstance(value, dict) else [value])
            if any(word.lower().startswith(PREFIX) and is_code(word[len(PREFIX) :])
                   for word in words):
                ignored = f"{key}={value!r} of the model's config is ignored"
                warn(f"{ignored}: name it yourself to run it", stacklevel=2)
                del config[key]
        elif isinstance(value, dict):
            _drop_code(value)


def _mask(name: str, sdpa_mask: Callable[..., Tensor | None], **options: Any) -> Mask:
    """transformers' mask for SDPA, proved; it makes none that is causal or hides nothing."""
    B, Tk, window = options["batch_size"], options["kv_length"], options.get("local_size")
    Tq = options["q_length"] if "q_length" in options else len(options["cache_position"])
    causal = "allow_is_bidirectional_skip" not in options
    # With one query, no mask means all keys, even free places.
    skip = options.pop("allow_is_causal_skip", True) and Tq > 1
    seen = sdpa_mask(**options, allow_is_causal_skip=skip)
    proof = Proof(Tq, Tq, window) if causal else Proof(Tq, Tk, right=None)
    if seen is not None:
        real, tokens = None, options.get("attention_mask")  # bool (B, Tq), False for padding
        if tokens is not None and (causal or Tq == Tk):
            at = options.get("cache_position")
            if at is None:  # transformers 5
                at = torch.arange(Tq, device=tokens.device) + options.get("q_offset", 0)
            missing = options.get("kv_offset", 0) + Tk - tokens.shape[1]  # of a static cache
            real = F.pad(tokens.bool(), (0, max(0, missing)))[:, at]
        try:
            proof = prove(seen, window if causal else None, real, causal)
        except ValueError as e:
            raise BackendUnavailable(f"{name} refuses the mask: {e}") from None
    return Mask.of(proof, (B, 1, Tq, Tk))


@kept
def _proved(mask: Tensor, window: int | None, Tq: int) -> Proof:
    one_row = mask.dim() == 4 and mask.shape[2] == 1  # as LayoutLM's
    return prove(mask.expand(-1, -1, Tq, -1) if one_row else mask, window)


def _proof(mask: Tensor | None, window: int | None, is_causal: bool | None,
           Tq: int, Tk: int) -> Proof:
    if mask is None:
        if is_causal is None or (is_causal and Tq != Tk):
            raise ValueError(f"{Tq} queries and {Tk} keys without a mask, is_causal={is_causal}")
        proof = Proof(Tq, Tk, right=0 if is_causal else None)
    elif not isinstance(mask, Mask):
        proof = _proved(mask, window, Tq)
    elif hasattr(mask, "proof"):
        proof = mask.proof
    else:
        raise ValueError("the model changed the mask")
    if proof.queries != Tq or proof.end > Tk or (mask is not None and mask.shape[-1] < Tk):
        raise ValueError(f"the mask does not fit {Tq} queries and {Tk} keys")
    if proof.right == 0 and window and proof.effective(window) != proof.effective(proof.window):
        raise ValueError(f"the layer's window is {window}, its mask's {proof.window or 'none'}")
    return proof


def _check_packing(position_ids: Tensor, proof: Proof, mask: Tensor | None) -> None:
    if symbolic(position_ids) or (isinstance(mask, Mask) and mask.checked is position_ids):
        return
    begins = position_ids[:, 1:] <= position_ids[:, :-1]
    if proof.texts is not None:
        at = proof.texts[:, -position_ids.shape[1] :].to(position_ids.device)
        begins = begins & (at[:, 1:] == at[:, :-1]) & (at[:, 1:] != 0)
    if bool(begins.any()):
        raise ValueError("position_ids restart within a row, but the mask joins the two texts")
    if isinstance(mask, Mask):
        mask.checked = position_ids


# layer -> (Spec, name, backend, kernels) -> Spec, choice, calls
_Calls = dict[tuple[object, ...], tuple[Spec, Resolution, int]]
_calls: WeakKeyDictionary[torch.nn.Module, _Calls] = WeakKeyDictionary()


def _attend(plans: Plans, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
            sliding_window: int | None = None, softcap: float | None = None,
            s_aux: Tensor | None = None, is_causal: bool | None = None,
            output_attentions: bool | None = None, position_ids: Tensor | None = None,
            **others: object) -> tuple[Tensor, Tensor | None]:
    """query (B, H, Tq, D), key and value (B, Hkv, Tk, D), s_aux (H,) -> (B, Tq, H, D), and any
    weights (B, H, Tq, Tk). Raises BackendUnavailable."""
    (B, H, Tq, D), (_, Hkv, Tk, _) = query.shape, key.shape
    try:
        if unknown := [n for n, x in others.items() if x is not None and n not in IGNORED]:
            raise ValueError(f"unknown argument {', '.join(unknown)}")
        if others.get("deterministic"):
            check_deterministic(query)
        if value.shape[3] != D:
            raise ValueError(f"value heads of {value.shape[3]}, key heads of {D}")
        # GPT-2 up to transformers 4.57
        if scaling is None and getattr(module, "scale_attn_by_inverse_layer_idx", False):
            raise ValueError("the layer does not pass its scale (scale_attn_by_inverse_layer_idx)")
        if half := autocast_dtype(query.device.type):  # as for SDPA
            query, key, value = (t if t.dtype == torch.float64 else t.to(half)
                                 for t in (query, key, value))
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        proof = _proof(attention_mask, sliding_window, causal, Tq, Tk)
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == Tq > 1:
            _check_packing(position_ids, proof, attention_mask)
        learned = any(t is not None and t.requires_grad for t in (query, key, value, s_aux))
        grad = torch.is_grad_enabled() and learned
        right = None if proof.right is None or proof.right >= Tq - 1 > 0 else proof.right
        spec = Spec(
            H, Hkv, D, str(query.dtype).removeprefix("torch."),
            window=proof.effective(proof.window), dropout=float(dropout),
            segments=proof.segments is not None, grad=grad,
            cache="none" if grad or Tq == proof.end or right != 0 else "dynamic",
            scale=None if scaling is None else float(scaling), softcap=softcap,
            sinks=s_aux is not None, right=right)
    except ValueError as e:
        who = f"{implementation(plans.name)} refuses {type(module).__name__}"
        raise BackendUnavailable(f"{who}: {e}") from None

    label = " with a cache" if spec.cache != "none" else " without gradients"
    chosen = plans.choose(spec, str(query.device), (B, Tq, proof.end), label)
    calls = _calls.setdefault(module, {})
    call = spec, chosen.requested, chosen.backend.name, chosen.kernels
    calls[call] = spec, chosen, calls.get(call, (0, 0, 0))[2] + 1
    options: dict[str, Tensor] = {} if s_aux is None else {"sinks": s_aux}
    if proof.segments is not None:
        options["segments"] = proof.segments.to(query.device).expand(B, -1)
    if output_attentions:
        warn(f"output_attentions=True stores {Tq} x {Tk} attention weights a head", stacklevel=2)
    runs = proof.runs or (([], slice(0, proof.end)),)  # a static cache has free places
    outs, Ps = [], []
    for rows, J in runs:
        tensors = (t.transpose(1, 2) for t in (query, key[:, :, J], value[:, :, J]))
        q, k, v = tensors if len(runs) == 1 else (t[rows] for t in tensors)
        outs.append(chosen.backend.attend(q, k, v, spec, **options))
        if output_attentions:
            P = weights(q, k, spec, **options).to(query.dtype)
            Ps.append(F.pad(P, (J.start, Tk - J.stop)))
    if len(runs) > 1:
        back = torch.tensor([b for rows, _ in runs for b in rows], device=query.device).argsort()
        outs, Ps = ([torch.cat(ts)[back]] if ts else [] for ts in (outs, Ps))
    return outs[0].contiguous(), Ps[0] if Ps else None


class Layer(NamedTuple):
    name: str  # "model.layers.0.self_attn"
    ran: tuple[tuple[Spec, Resolution, int], ...]  # and how many times

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{chosen.backend.name} (kernel: {', '.join(chosen.kernels) or 'plain operators'}), "
            f"{n} call{'s' * (n > 1)}, {spec}"
            + "".join(f"; {name} refused: {'; '.join(w)}" for name, w in chosen.rejected.items())
            for spec, chosen, n in self.ran) or ("NOT CALLED",)


class Report(tuple[Layer, ...]):
    """Equal layers are printed once."""

    def __str__(self) -> str:
        number = re.compile(r"(?<=\.)\d+(?=\.|$)")
        alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for layer in self:
            alike.setdefault((number.sub("*", layer.name), layer.lines()), []).append(layer.name)
        found = []
        for (pattern, lines), names in alike.items():
            numbers = ", ".join(".".join(number.findall(name)) for name in names)
            title = names[0] if len(names) == 1 else f"{pattern} ({len(names)} layers: {numbers})"
            found += [f"{title}: {line}" for line in lines]
        return "\n".join(found)


def report(model: torch.nn.Module) -> Report:
    """The kernels of each attention layer, by the profiler. Raises RuntimeError: none ran."""
    modules = {n: m for n, m in model.named_modules()
               if m in _calls or "Attention" in type(m).__name__}
    inner = [n for n in modules if not any(other.startswith(f"{n}.") for other in modules)]
    layers = [Layer(n, tuple(_calls.get(modules[n], {}).values())) for n in inner]
    if not any(layer.ran for layer in layers):
        raise RuntimeError(f"no attention layer of {len(layers)} in {type(model).__name__} has run "
                           "through nanoattn: call the model first, or it computes its own")
    return Report(layers)
