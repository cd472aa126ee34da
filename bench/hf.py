"""--hf=FOLDER_OR_NAME: benchmark a causal language model of transformers with random weights.

FLOPs are counted by FlopCounterMode; those of attention are core/flops.py's, by layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention import Resolution, Spec
from attention import hf as bridge
from bench import Json
from core.flops import Sizes, flops_per_token, mean_keys
from core.options import TrainConfig
from core.settings import UserError, first_line, from_dict
from model import GPTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIVALS = {"hf_eager": "hf=eager", "hf_sdpa": "hf=sdpa"}  # transformers' own attention
CACHES = ("dynamic", "static")  # of its generate()
FIELDS = ("n_head", "n_kv_head", "head_dim", "window", "scale", "softcap", "sinks")  # of a layer


@dataclass(frozen=True)
class Counted:
    """Sizes of a model, in place of GPTConfig."""

    layers: list[Json]  # FIELDS of each attention layer's Spec
    parameters: int
    other_flops: float  # a token, forward and backward, without attention's products
    n_embd: int
    vocab_size: int
    block_size: int
    dropout: float = 0.0
    bias: bool = False

    n_layer = property(lambda self: len(self.layers))
    n_head = property(lambda self: self.layers[0]["n_head"])
    kv_heads = property(lambda self: self.layers[0]["n_kv_head"])
    head_dim = property(lambda self: self.layers[0]["head_dim"])
    windows = property(lambda self: tuple(layer["window"] for layer in self.layers))


@flops_per_token.register
def _(config: Counted, T: int, causal: bool = False) -> float:
    found = config.other_flops
    for layer in config.layers:
        keys = mean_keys(T, layer["window"]) if causal else T
        found += 12 * layer["n_head"] * layer["head_dim"] * keys
    return found


def model_of(part: Json) -> Sizes:
    """Return the GPTConfig of the settings, or the counted sizes of a transformers model."""
    if "counted" in part.get("hf", {}):
        return Counted(**part["hf"]["counted"])
    ours = {f.name for f in fields(TrainConfig)} - {"batch_size"}
    given = {k: v for k, v in part["settings"].items() if k in ours}
    return GPTConfig.of(from_dict(TrainConfig, given), part["vocab_size"])


def read(name: str) -> Json:
    """Return the config of the model's text part; UserError without transformers or a config."""
    try:
        from transformers import AutoConfig
    except ImportError as e:
        raise UserError(f"--hf needs the package transformers ({first_line(e)})") from e
    if not Path(name).exists() and (name[:1] in "/.~" or name.count("/") > 1):  # not a hub name
        raise UserError(f"--hf={name}: no such folder")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except Exception as e:  # a config's own checks may raise anything
        raise UserError(f"--hf={name}: cannot read a model's config ({first_line(e)})") from e
    return json.loads(config.to_json_string(use_diff=False))


def rows_of(backends: Iterable[str]) -> dict[str, str]:
    """Return {row: argument of candidates.build()} of our backends."""
    return {name: f"hf={bridge.implementation(name)}" for name in backends}


def build(sizes: Json, implementation: str, config: TrainConfig) -> torch.nn.Module:
    """Return the model of a config with random float32 weights.

    Raises UserError if transformers cannot build it, or it has fewer positions than block_size.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = dict(sizes)
    for name in given:  # the name depends on the architecture
        if name.endswith(("dropout", "pdrop")) and isinstance(given[name], (int, float)):
            given[name] = config.dropout
    made = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    longest = getattr(made, "max_position_embeddings", None)
    if longest and longest < config.block_size:
        raise UserError(f"--block_size={config.block_size}: the model has {longest} positions")
    if implementation.startswith(bridge.PREFIX):
        bridge.register(policy=config.policy)  # no fallback: job.Bench.job()
    try:
        new: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_config
        model = new(made, attn_implementation=implementation, trust_remote_code=False)
    except (ValueError, ImportError) as e:
        raise UserError(" ".join(str(e).split()).partition(". ")[0]) from e
    return model.float()  # lower precision by autocast


def ran(model: PreTrainedModel) -> list[Resolution]:
    """Return each layer's kernel; [] for transformers' own attention."""
    if not model.config._attn_implementation.startswith(bridge.PREFIX):
        return []
    return [chosen for layer in bridge.report(model) for _, chosen, _ in layer.ran]


def specs(model: PreTrainedModel, x: torch.Tensor) -> list[Spec]:
    """Run x, (B, T) int64, once; return the layers' Specs and set eager attention.

    Raises BackendUnavailable if the bridge refuses the model, UserError if it is not causal.
    """
    with torch.no_grad():
        model(input_ids=x, use_cache=False)
    model.config._attn_implementation = "eager"
    found = [spec for layer in bridge.report(model) for spec, _, _ in layer.ran]
    if any(spec.right != 0 for spec in found):
        raise UserError("its attention is not causal")
    return found


def parameters(model: PreTrainedModel) -> int:
    """Count the parameters, without embeddings that are only looked up."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    looked_up -= {id(head.weight)} if head is not None else set()
    return sum(p.numel() for p in model.parameters() if id(p) not in looked_up)
