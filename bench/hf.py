"""--hf=FOLDER_OR_NAME: a causal language model of transformers in the modes train and decode, with
every backend here (attention/hf.py) beside transformers' own eager and sdpa attention.

A config is enough: the weights are random, the same in every row. Its FLOPs are what torch's
FlopCounterMode counts in a forward and backward pass of one sequence with eager attention, which
hides none; but attention's products, 12 H D T a token and layer there, are counted by the formula
of core/flops.py: mfu by the whole square of scores, mfu_causal by the keys that a query sees, in
each layer by its own window. A mixture of experts counts as it routed random tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention import Resolution, Spec
from attention import hf as bridge
from bench.job import Job
from core.flops import flops_per_token, mean_keys
from core.hub import why_not_hub
from core.settings import UserError, first_line

IMPLEMENTATIONS = ("eager", "sdpa")  # of transformers, as baselines
CACHES = ("dynamic", "static")  # of its generate()
ASKED = ("n_head", "n_kv_head", "head_dim", "window", "scale", "softcap", "sinks")  # of a layer


@dataclass(frozen=True)
class Counted:
    """What the figures have to know of such a model, as GPTConfig tells it of ours."""

    layers: list[dict[str, Any]]  # what those with attention ask for: ASKED
    parameters: int
    other_flops: float  # a token, forward and backward: all but attention's products
    n_embd: int
    vocab_size: int
    block_size: int
    dropout: float = 0.0
    bias: bool = False

    n_layer = property(lambda self: len(self.layers))
    n_head = property(lambda self: self.layers[0]["n_head"])
    kv_heads = property(lambda self: self.layers[0]["n_kv_head"])
    head_dim = property(lambda self: self.layers[0]["head_dim"])
    attention_window = property(lambda self: self.layers[0]["window"])


@flops_per_token.register
def _(config: Counted, T: int, causal: bool = False) -> float:
    found = config.other_flops
    for layer in config.layers:
        keys = mean_keys(T, layer["window"]) if causal else T
        found += 12 * layer["n_head"] * layer["head_dim"] * keys
    return found


def read(name: str) -> dict[str, Any]:
    """The config of the model, as JSON has it: of its text part, where it has several."""
    try:
        from transformers import AutoConfig
    except ImportError as e:
        raise UserError(f"--hf needs the package transformers ({first_line(e)})") from e
    if not Path(name).exists() and (name[:1] in "/.~" or name.count("/") > 1):  # none of the hub's
        raise UserError(f"--hf={name}: there is no such folder")
    offline = None if Path(name).exists() else why_not_hub()
    try:
        how: Any = {"trust_remote_code": False, "local_files_only": offline is not None}
        config = AutoConfig.from_pretrained(name, **how).get_text_config()
    except Exception as e:  # OSError, ValueError, and whatever a config's own checks raise
        why = offline or first_line(e)
        raise UserError(f"--hf={name}: no model's config can be read there ({why})") from e
    return json.loads(config.to_json_string(use_diff=False))


def rows_of(backends: list[str]) -> dict[str, str]:
    """The rows, and what candidates.build() takes for each."""
    ours = {name: f"hf={bridge.implementation(name)}" for name in backends}
    return ours | {f"hf_{name}": f"hf={name}" for name in IMPLEMENTATIONS}


def build(job: Job, config: dict[str, Any], implementation: str) -> Any:
    """The model with random weights, on the device; UserError where transformers refuses it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    told = dict(config)
    for name in told:  # each architecture has names of its own
        if name.endswith(("dropout", "pdrop")) and isinstance(told[name], (int, float)):
            told[name] = job.config.dropout
    sizes = CONFIG_MAPPING[told["model_type"]].from_dict(told)
    longest = getattr(sizes, "max_position_embeddings", None)
    if longest and longest < job.config.block_size:
        raise UserError(f"--block_size={job.config.block_size}: it has {longest} positions")
    if implementation.startswith(bridge.PREFIX):
        bridge.register(policy=job.config.policy)  # no fallback: Bench.job()
    try:
        make: Any = AutoModelForCausalLM.from_config
        model = make(sizes, attn_implementation=implementation, trust_remote_code=False)
    except (ValueError, ImportError) as e:
        raise UserError(" ".join(str(e).split()).partition(". ")[0]) from e
    return model.to(job.device, torch.float32)  # autocast does the rest, as for ours


def ran(model: Any) -> list[Resolution]:
    """What ran in each layer, for everything that it was asked; [] for transformers' own."""
    if not model.config._attn_implementation.startswith(bridge.PREFIX):
        return []
    return [chosen for layer in bridge.report(model) for _, chosen, _ in layer.ran]


def asked(model: Any, x: torch.Tensor) -> list[Spec]:
    """What each attention layer asks for, by one pass of x, (B, T) int64, through attention/hf.py,
    which raises BackendUnavailable for a model that it refuses; after it the model has eager
    attention."""
    with torch.no_grad():
        model(input_ids=x, use_cache=False)
    model.config._attn_implementation = "eager"
    return [spec for layer in bridge.report(model) for spec, _, _ in layer.ran]


def counted(job: Job, model: Any, specs: list[Spec], flops: float) -> Counted:
    """Args: flops: a token, with eager attention."""
    T = job.config.block_size
    squares = sum(12 * spec.n_head * spec.head_dim * T for spec in specs)
    layers = [{name: getattr(spec, name) for name in ASKED} for spec in specs]
    sizes = (model.config.hidden_size, job.vocab_size, T, job.config.dropout)
    return Counted(layers, parameters(model), flops - squares, *sizes)


def parameters(model: Any) -> int:
    """Its parameters, without embeddings of which a token reads one row: of positions, and of
    tokens where the head has weights of its own."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    looked_up -= {id(head.weight)} if head is not None else set()
    return sum(p.numel() for p in model.parameters() if id(p) not in looked_up)
