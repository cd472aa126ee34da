"""Models of transformers with random weights, and all candidates' float32 reference. A rival GPT-2
always has biases; its MFU uses the same FLOPs as all others."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from attention import Resolution, Spec
from attention import hf as bridge
from bench import Json
from bench.candidates import Candidate, Job, Ours, Times, refuse
from checkpoint import families
from core.settings import UserError, first_line
from model import GPTConfig

CACHES = ("dynamic", "static")


def read(name: str) -> Json:
    try:
        from transformers import AutoConfig

        if not Path(name).exists() and (name[:1] in "/.~" or name.count("/") > 1):
            raise FileNotFoundError("no such folder")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except Exception as e:  # its checks may raise anything
        raise UserError(f"--hf={name}: cannot read a model's config ({first_line(e)})") from e
    return json.loads(config.to_json_string(use_diff=False))


class HuggingFace(Candidate):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        muon, again = self.config.optimizer == "muon", self.config.gradient_checkpointing
        refuse({"gradient_checkpointing": again, "optimizer=muon": muon})
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        same = families.write_config(GPTConfig.of(self.config, job.vocab_size))
        sizes = dict(job.hf or same | {"bos_token_id": None, "eos_token_id": None})
        for name, value in sizes.items():  # the name depends on the architecture
            if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)):
                sizes[name] = self.config.dropout
        config = CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)
        longest = getattr(config, "max_position_embeddings", None)
        if longest and longest < (T := self.config.block_size):
            raise UserError(f"--block_size={T}: the model has {longest} positions")
        if job.what.startswith(bridge.PREFIX):
            bridge.register(policy=self.config.policy)  # no fallback: Bench.job()
        try:
            new = transformers.AutoModelForCausalLM.from_config
            model = new(config, attn_implementation=job.what, trust_remote_code=False)
        except (ValueError, ImportError) as e:
            raise UserError(" ".join(str(e).split()).partition(". ")[0]) from e
        self.model = model.float().to(job.device)  # lower precision by autocast

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        if not self.job.what.startswith(bridge.PREFIX):
            return []
        return [chosen for layer in bridge.report(self.model) for _, chosen, _ in layer.ran]

    @property
    def parameters(self) -> int:
        if not self.job.hf:
            return super().parameters
        # Embeddings that are only looked up do not count.
        looked_up = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        looked_up -= {getattr(self.model.get_output_embeddings(), "weight", None)}
        return sum(p.numel() for p in self.model.parameters() if p not in looked_up)

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

    def __init__(self, job: Job) -> None:
        exact = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
        exact |= {"optimizer": "adamw"}  # no step is taken
        job = job.but(attention_backend="manual", gradient_checkpointing=False, **exact)
        self.device, T = job.device, job.config.block_size
        kind, what = (HuggingFace, bridge.implementation("manual")) if job.hf else (Ours, "")
        who: Candidate = kind(replace(job, what=what))
        who.for_training()
        x, y = job.random_tokens(job.config.batch_size)
        specs: list[Spec] = []
        if job.hf:
            with torch.no_grad():
                who.model(input_ids=x[:1], use_cache=False)
            who.model.config._attn_implementation = "eager"
            specs = [spec for layer in bridge.report(who.model) for spec, _, _ in layer.ran]
            if any(spec.right != 0 for spec in specs):
                raise UserError("its attention is not causal")
        who.loss(x[:1], y[:1])  # probes the backend, uncounted

        addmm = {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}  # the head's
        counter = FlopCounterMode(display=False, custom_mapping=addmm)
        total = 0.0
        for i in range(len(x)):
            with counter if i == 0 else nullcontext():
                loss = who.loss(x[i : i + 1], y[i : i + 1]) / len(x)
                loss.backward()
            total += float(loss.detach())
        per_token = counter.get_total_flops() / T
        self.about: Json = {"loss": total, "gradient_norm": who.gradient_norm()}
        self.about["flops_per_token"] = per_token
        if job.hf:
            sizes = ("n_head", "n_kv_head", "head_dim", "window", "scale", "softcap", "sinks")
            layers = [{name: getattr(spec, name) for name in sizes} for spec in specs]
            others = per_token - sum(12 * spec.n_head * spec.head_dim * T for spec in specs)
            counted = {"layers": layers, "parameters": who.parameters, "other_flops": others}
            counted |= {"n_embd": who.model.config.hidden_size, "vocab_size": job.vocab_size}
            counted |= {"block_size": T, "dropout": job.config.dropout, "bias": False}
            self.about["counted"] = counted
