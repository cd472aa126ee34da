"""Models of transformers with random weights, and all candidates' float32 reference. A rival GPT-2
always has biases; its MFU uses the same FLOPs as all others."""

from __future__ import annotations

import importlib.util
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention import Resolution, Spec
from attention import hf as bridge
from bench import Json
from bench.candidates import Candidate, Job, Times, build
from checkpoint import families
from core.flops import Sizes, flops_per_token, mean_keys
from core.options import TrainConfig
from core.settings import UserError, first_line, from_dict
from model import GPTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "bench.hf:HuggingFace="
CACHES = ("dynamic", "static")
FIELDS = ("n_head", "n_kv_head", "head_dim", "window", "scale", "softcap", "sinks")


@dataclass(frozen=True)
class Counted:
    layers: list[Json]  # with FIELDS
    parameters: int
    other_flops: float  # a token, without attention
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
    if "counted" in part.get("hf", {}):
        return Counted(**part["hf"]["counted"])
    ours = {f.name for f in fields(TrainConfig)} - {"batch_size"}
    given = {k: v for k, v in part["settings"].items() if k in ours}
    return GPTConfig.of(from_dict(TrainConfig, given), part["vocab_size"])


def read(name: str) -> Json:
    try:
        from transformers import AutoConfig

        if not Path(name).exists() and (name[:1] in "/.~" or name.count("/") > 1):
            raise FileNotFoundError("no such folder")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except Exception as e:  # its checks may raise anything
        raise UserError(f"--hf={name}: cannot read a model's config ({first_line(e)})") from e
    return json.loads(config.to_json_string(use_diff=False))


def ours(backend: str) -> str:
    return KIND + bridge.implementation(backend)


def specs_of(model: PreTrainedModel, x: Tensor) -> list[Spec]:
    """Layers' Specs for x (B, T) int64; sets eager attention. UserError: not causal."""
    with torch.no_grad():
        model(input_ids=x, use_cache=False)
    model.config._attn_implementation = "eager"
    found = [spec for layer in bridge.report(model) for spec, _, _ in layer.ran]
    if any(spec.right != 0 for spec in found):
        raise UserError("its attention is not causal")
    return found


def parameters(model: PreTrainedModel) -> int:
    """Number of parameters but embeddings that are only looked up."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    looked_up -= {id(head.weight)} if head is not None else set()
    return sum(p.numel() for p in model.parameters() if id(p) not in looked_up)


class HuggingFace(Candidate):
    def __init__(self, implementation: str, job: Job) -> None:
        super().__init__(implementation, job)
        if importlib.util.find_spec("transformers") is None:
            raise UserError("package 'transformers' is not installed (pip install transformers)")
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.title, self.as_reference = f"transformers {transformers.__version__}", bool(job.hf)
        if implementation == "flash_attention_2" and job.device.type != "cuda":
            raise UserError(f"flash_attention_2 runs on cuda, not on {job.device.type}")
        same = families.write_config(GPTConfig.of(self.config, job.vocab_size))
        sizes = dict(job.hf or same | {"bos_token_id": None, "eos_token_id": None})
        for name, value in sizes.items():  # the name depends on the architecture
            if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)):
                sizes[name] = self.config.dropout
        config = CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)
        longest = getattr(config, "max_position_embeddings", None)
        if longest and longest < (T := self.config.block_size):
            raise UserError(f"--block_size={T}: the model has {longest} positions")
        if implementation.startswith(bridge.PREFIX):
            bridge.register(policy=self.config.policy)  # no fallback: Bench.job()
        try:
            new = transformers.AutoModelForCausalLM.from_config
            model = new(config, attn_implementation=implementation, trust_remote_code=False)
        except (ValueError, ImportError) as e:
            raise UserError(" ".join(str(e).split()).partition(". ")[0]) from e
        self.model = model.float().to(job.device)  # lower precision by autocast

    def unsupported(self) -> Json:
        return {"gradient_checkpointing": self.config.gradient_checkpointing}

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        if not self.model.config._attn_implementation.startswith(bridge.PREFIX):
            return []
        return [chosen for layer in bridge.report(self.model) for _, chosen, _ in layer.ran]

    @property
    def parameters(self) -> int:
        return parameters(self.model) if self.job.hf else super().parameters

    def make_optimizer(self) -> torch.optim.AdamW:
        c, fused = self.config, self.setup.device.type in ("cuda", "cpu")
        how: Json = {"lr": c.learning_rate, "betas": (c.beta1, c.beta2), "fused": fused}
        return torch.optim.AdamW(self.model.parameters(), weight_decay=c.weight_decay, **how)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # It shifts the labels itself.
        return self.run(input_ids=x, labels=x, use_cache=False).loss

    def write(self, prompt: Tensor, new: int, cache: str, **more: object) -> Times:
        if cache not in CACHES or more:
            raise UserError("it has the caches dynamic and static, and no --constraint")
        times: list[float] = []
        note = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        how: Json = {"max_new_tokens": new, "do_sample": False, "use_cache": True}
        how |= {"cache_implementation": cache, "disable_compile": not self.compile}
        how |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
        found = self.model.generate(prompt, streamer=note, **how)
        # The streamer receives the prompt first.
        assert len(times) == 1 + new and found.sequences.shape[1] == prompt.shape[1] + new
        layers = found.past_key_values.layers
        return times[1], times[-1], sum(t.nbytes for x in layers for t in (x.keys, x.values))


class Reference:
    """Loss, gradients and FLOPs of the first batch by manual (--hf: eager) in float32."""

    def __init__(self, sent: Json) -> None:
        exact = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
        job = Job(sent, attention_backend="manual", gradient_checkpointing=False, **exact)
        self.device = job.device
        kind = ours("manual") if job.hf else ""
        who = build(kind, job).for_training(job.setup.scaler())
        x, y = job.random_tokens(job.config.batch_size)
        specs = specs_of(who.model, x[:1]) if job.hf else []
        who.loss(x[:1], y[:1])  # probes the backend, uncounted

        def addmm(out: object, a: torch.Size, b: torch.Size, out_shape: object, **_: object) -> int:
            return 2 * a[0] * a[1] * b[1]

        # torch does not count the head's addmm_.
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})
        total = 0.0
        for i in range(len(x)):
            with counter if i == 0 else nullcontext():
                loss = who.loss(x[i : i + 1], y[i : i + 1]) / len(x)
                loss.backward()
            total += float(loss.detach())
        params = list(who.model.parameters())
        per_token = counter.get_total_flops() / job.config.block_size
        self.about = {
            "loss": total,
            "gradient_norm": who.gradient_norm(),
            "flops_per_token": per_token,
            # in 6 N, not counted by torch
            "elementwise_parameters": sum(p.numel() for p in params if p.dim() == 1),
        }
        if job.hf:
            T, C = job.config.block_size, who.model.config.hidden_size
            layers = [{name: getattr(spec, name) for name in FIELDS} for spec in specs]
            others = per_token - sum(12 * spec.n_head * spec.head_dim * T for spec in specs)
            sizes = (who.parameters, others, C, job.vocab_size, T, job.config.dropout)
            self.about["counted"] = asdict(Counted(layers, *sizes))
