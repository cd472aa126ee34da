"""Candidates that are not ours: nanoGPT, and models of transformers with random weights, also with
our backends. A rival GPT-2 of theirs always has biases; its MFU uses the same FLOPs as all others.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from attention import Resolution, Spec
from attention import hf as bridge
from attention.machine.system import synchronize
from bench import Json
from bench.candidates import Bench, Candidate, Ours, Times
from checkpoint import families
from core.options import TrainConfig
from core.settings import UserError, first_line
from model import GPTConfig

CACHES = ("dynamic", "static")  # of transformers
Who = tuple[type[Candidate], str]  # a kind, and its `what`


def refuse(lacking: Json) -> None:
    """UserError for {option that a model lacks: is it used?}"""
    if used := [name for name, is_used in lacking.items() if is_used]:
        raise UserError(f"it does not support {' and '.join(used)}")


class NanoGPT(Candidate):
    def build(self, cast: bool = False) -> Any:
        config, plain = self.config, TrainConfig()
        names = ("position", "norm", "mlp", "qk_norm", "tied", "optimizer",
                 "gradient_checkpointing")  # fmt: skip
        lacking = {n: getattr(config, n) != getattr(plain, n) for n in names}
        lacking["attention_window"] = any(config.attention_window)
        lacking["n_kv_head"] = config.n_kv_head not in (None, config.n_head)
        refuse(lacking | {"gelu=tanh": config.gelu == "tanh", "bias=qkv": config.bias == "qkv"})
        spec = importlib.util.spec_from_file_location("nanogpt_model", self.what)
        assert spec and spec.loader
        theirs = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = theirs  # its dataclass looks itself up there
        spec.loader.exec_module(theirs)
        same = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
        sizes = {name: getattr(config, name) for name in same}
        model = theirs.GPT(theirs.GPTConfig(vocab_size=self.bench.vocab_size, **sizes))
        return model.to(self.device, self.setup.dtype if cast else None)

    def make_optimizer(self) -> torch.optim.AdamW:
        c = self.config
        args = (c.weight_decay, c.learning_rate, (c.beta1, c.beta2), self.device.type)
        return self.model.configure_optimizers(*args)

    def write(self, prompt: Tensor, new: int, cache: str, **more: object) -> Times:
        if cache != "none" or more:
            raise UserError("its generate() has no cache and no --constraint")
        began: list[float] = []

        def note(module: object, inputs: object) -> None:  # once per token
            if len(began) == 1:  # on a GPU the first token may still be computed
                synchronize(self.device)
            began.append(time.perf_counter())

        with self.model.register_forward_pre_hook(note):
            text = self.model.generate(prompt, new, temperature=1.0, top_k=None)
        synchronize(self.device)
        end = time.perf_counter()
        assert len(began) == new and text.shape[1] == prompt.shape[1] + new, text.shape
        return began[1], end, 0


class HuggingFace(Candidate):
    def build(self, cast: bool = False) -> Any:
        muon, again = self.config.optimizer == "muon", self.config.gradient_checkpointing
        refuse({"gradient_checkpointing": again, "optimizer=muon": muon})
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        same = families.write_config(GPTConfig.of(self.config, self.bench.vocab_size))
        same |= {"bos_token_id": None, "eos_token_id": None}
        sizes = dict(self.bench.hf.get("config", same))
        for name, value in sizes.items():  # the name depends on the architecture
            if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)):
                sizes[name] = self.config.dropout
        config = CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)
        longest = getattr(config, "max_position_embeddings", None)
        if longest and longest < (T := self.config.block_size):
            raise UserError(f"--block_size={T}: the model has {longest} positions")
        if self.ours:
            bridge.register(policy=self.config.policy)  # without fallback
        try:
            new = transformers.AutoModelForCausalLM.from_config
            model = new(config, attn_implementation=self.what, trust_remote_code=False)
        except (ValueError, ImportError) as e:
            raise UserError(" ".join(str(e).split()).partition(". ")[0]) from e
        # In training lower precision is autocast's.
        return model.float().to(self.device, self.setup.dtype if cast else None)

    @property
    def ours(self) -> bool:
        return self.what.startswith(bridge.PREFIX)

    def chosen(self, cache: str | None = None) -> list[Resolution]:
        layers = bridge.report(self.model) if self.ours else ()
        return [chosen for layer in layers for _, chosen, _ in layer.ran]

    @property
    def parameters(self) -> int:
        # Embeddings that are only looked up do not count.
        looked_up = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        looked_up -= {getattr(self.model.get_output_embeddings(), "weight", None)}
        return sum(p.numel() for p in self.model.parameters() if p not in looked_up)

    def make_optimizer(self) -> torch.optim.AdamW:
        c, fused = self.config, self.device.type in ("cuda", "cpu")
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
        how |= {"cache_implementation": cache, "disable_compile": self.config.compile is not True}
        how |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
        found = self.model.generate(prompt, streamer=note, **how)
        # The streamer receives the prompt first.
        assert len(times) == 1 + new and found.sequences.shape[1] == prompt.shape[1] + new
        layers = found.past_key_values.layers
        return times[1], times[-1], sum(t.nbytes for x in layers for t in (x.keys, x.values))


def read(name: str) -> Json:
    try:
        from transformers import AutoConfig

        if not Path(name).exists() and (name[:1] in "/.~" or name.count("/") > 1):
            raise FileNotFoundError("no such folder")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except Exception as e:  # its checks may raise anything
        raise UserError(f"--hf={name}: cannot read a model's config ({first_line(e)})") from e
    return json.loads(config.to_json_string(use_diff=False))


def named(words: tuple[str, ...], mode: str = "train") -> dict[str, Who]:
    """Rows of --rival."""
    of_hf = ("sdpa",) if mode == "decode" else ("eager", "sdpa", "flash_attention_2")
    found: dict[str, Who] = {}
    for word in words:
        name, _, path = word.partition("=")
        if name == "nanogpt" and path:
            model = Path(path).expanduser().resolve() / "model.py"
            if not model.is_file():
                raise UserError(f"{path} is not a nanoGPT checkout (model.py not found)")
            found["nanogpt"] = NanoGPT, str(model)
        elif word == "hf":
            found |= {f"hf_{a}": (HuggingFace, a) for a in of_hf}
        else:
            raise UserError(f"--rival must be nanogpt=PATH or hf, got {word!r}")
    return found


def candidates(bench: Bench, **changes: Any) -> dict[str, Candidate]:
    """By row: the first backend, rivals, the others, slow ones."""
    backends = sorted(bench.backends, key=bench.slow.__contains__)
    rows = named(getattr(bench.config, "rival", ()), bench.mode)
    made: dict[str, Candidate]
    if bench.hf:
        rows = {f"hf_{a}": (HuggingFace, a) for a in ("eager", "sdpa")}
        made = {n: HuggingFace(bench, n, bridge.implementation(n), **changes) for n in backends}
    else:
        made = {n: Ours(bench, n, attention_backend=n, **changes) for n in backends}
    others = {n: kind(bench, n, what, **changes) for n, (kind, what) in rows.items()}
    return dict([*made.items()][:1]) | others | made


def reference(of: Candidate) -> Json:
    """Loss, gradients and FLOPs of the first batch by manual (--hf: eager) in float32."""
    exact: Json = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
    exact |= {"attention_backend": "manual", "gradient_checkpointing": False}
    exact |= {"optimizer": "adamw"}  # no step is taken
    bench, T, B = of.bench, of.config.block_size, of.config.batch_size
    kind, what = (HuggingFace, bridge.implementation("manual")) if bench.hf else (Ours, "")
    who = kind(bench, "", what, batch_size=B, **exact)
    who.for_training()
    x, y = who.random_tokens(B)
    specs: list[Spec] = []
    if bench.hf:
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
    for i in range(B):
        with counter if i == 0 else nullcontext():
            loss = who.loss(x[i : i + 1], y[i : i + 1]) / B
            loss.backward()
        total += float(loss.detach())
    per_token = counter.get_total_flops() / T
    found: Json = {"loss": total, "gradient_norm": who.gradient_norm()}
    found["flops_per_token"] = per_token
    if bench.hf:
        sizes = ("n_head", "n_kv_head", "head_dim", "window", "scale", "softcap", "sinks")
        layers = [{name: getattr(spec, name) for name in sizes} for spec in specs]
        others = per_token - sum(12 * spec.n_head * spec.head_dim * T for spec in specs)
        N = who.parameters - sum(p.numel() for p in who.model.parameters() if p.dim() < 2)
        if not 0.9 < others / (6 * N) < 1.1:  # experts, or unknown operators
            counts = f"{others:,.0f} FLOPs a token for matrices of {N:,}"
            raise UserError(f"it cannot be counted: {counts}, not 6 for each (experts?)")
        counted = {"layers": layers, "parameters": who.parameters, "other_flops": others}
        counted |= {"n_embd": who.model.config.hidden_size, "vocab_size": bench.vocab_size}
        counted |= {"block_size": T, "dropout": of.config.dropout, "bias": False}
        found["counted"] = counted
    return found
