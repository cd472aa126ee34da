"""Other people's GPT-2 at the same sizes, in the same rounds, so that a ratio can be claimed.

    --rival nanogpt=PATH    karpathy/nanoGPT: the model.py of the checkout in PATH is imported from
                            there, and stepped as its train.py does
    --rival hf              transformers' GPT2LMHeadModel with its own attention implementations:
                            hf_eager, hf_sdpa and, where it is installed, hf_flash_attention_2,
                            stepped as its Trainer does (fused AdamW, gradients clipped)

In the mode decode each writes with its own generate(). nanoGPT has no cache and no logits
processors, and samples; transformers takes the likeliest token, with sdpa, its default, and has a
row for each cache of its that is also one of ours. Its static cache is compiled where ours is.

Nothing of them is copied here. A model that cannot have what was asked (grouped-query heads, a
window) says so and is not measured. transformers' GPT-2 always has biases: a few thousandths more
parameters; its MFU is reckoned with the same FLOPs as everyone's.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.runtime import synchronize, why_not_compile
from core.settings import UserError
from train import TrainConfig

HF = ("eager", "sdpa", "flash_attention_2")
CACHES = {"nanogpt": ("none",), "hf": ("dynamic", "static")}  # with which generate() is measured
Processor = Callable[[Tensor, Tensor], Tensor]


def contenders(asked: tuple[str, ...], implementations: tuple[str, ...] = HF) -> dict[str, str]:
    """--rival's words -> {name of the row: what build() and writer() want}.

    Args:
        implementations: of transformers' attention, a row each.

    Raises:
        UserError: an unknown rival, or a path that is no checkout.
    """
    found: dict[str, str] = {}
    for word in asked:
        name, _, path = word.partition("=")
        if name == "nanogpt" and path:
            model = Path(path).expanduser().resolve() / "model.py"
            if not model.is_file():
                raise UserError(f"{path} is no checkout of nanoGPT: it has no model.py")
            found["nanogpt"] = f"nanogpt={model}"
        elif word == "hf":
            found |= {f"hf_{a}": f"hf={a}" for a in implementations}
        else:
            raise UserError(f"--rival is nanogpt=PATH or hf, got {word!r}")
    return found


def can_write(rival: str, cache: str, processor: bool) -> bool:
    """Whether its generate() knows such a cache, and logits processors."""
    name = rival.partition("=")[0]
    return cache in CACHES[name] and not (processor and name == "nanogpt")


def check(name: str, config: TrainConfig) -> None:
    """Raises: UserError where the rival cannot do what is asked."""
    wanted = {
        "attention_window": config.attention_window,
        "n_kv_head": None if config.n_kv_head == config.n_head else config.n_kv_head,
        "gradient_checkpointing": config.gradient_checkpointing or None,
        "gelu=tanh": (config.gelu == "tanh" and name == "nanogpt") or None,
    }
    if lacks := [k for k, v in wanted.items() if v is not None]:
        raise UserError(f"it has no {' and no '.join(lacks)}")


def build(rival: str, config: TrainConfig, vocab_size: int, device: torch.device,
          autocast: Any, scaler: Any) -> Any:  # fmt: skip
    """The rival's model and optimizer.

    Raises:
        UserError: it cannot do what is asked.
    """
    kinds = {"nanogpt": NanoGPT, "hf": HuggingFace}
    return _made(kinds, rival, config, vocab_size, device, scaler)


def writer(rival: str, config: TrainConfig, vocab_size: int, device: torch.device,
           dtype: torch.dtype) -> Any:  # fmt: skip
    """The rival's model for generation, in `dtype`; see bench/decoding.py, Ours.

    Raises:
        UserError: it cannot do what is asked.
    """
    kinds = {"nanogpt": NanoGPTWriter, "hf": HuggingFaceWriter}
    return _made(kinds, rival, config, vocab_size, device, dtype)


def _made(kinds: dict[str, Any], rival: str, config: TrainConfig, *how: Any) -> Any:
    name, _, what = rival.partition("=")
    check(name, config)
    return kinds[name](what, config, *how)


def nanogpt_model(path: str, config: TrainConfig, vocab_size: int) -> Any:
    """A new model by the model.py at `path`, on the CPU."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec and spec.loader
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = theirs  # its dataclass looks itself up there
    spec.loader.exec_module(theirs)
    same = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    sizes = {name: getattr(config, name) for name in same}
    return theirs.GPT(theirs.GPTConfig(vocab_size=vocab_size, **sizes))


def hf_model(implementation: str, config: TrainConfig, vocab_size: int, device: torch.device,
             use_cache: bool) -> tuple[Any, str]:  # fmt: skip
    """A new GPT-2 of transformers on the CPU, and its title.

    Raises:
        UserError: a package is missing, or `implementation` does not run on `device`.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError("package 'transformers' is not installed (pip install transformers)")
    import transformers

    if implementation == "flash_attention_2" and device.type != "cuda":
        raise UserError(f"flash_attention_2 runs on cuda, not on {device.type}")
    settings: Any = transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=config.block_size, n_embd=config.n_embd,
        n_layer=config.n_layer, n_head=config.n_head, resid_pdrop=config.dropout,
        embd_pdrop=config.dropout, attn_pdrop=config.dropout, use_cache=use_cache,
        activation_function="gelu" if config.gelu == "exact" else "gelu_new",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            settings, attn_implementation=implementation
        )
    except ImportError as e:
        raise UserError(" ".join(str(e).split())) from e
    return model, f"transformers {transformers.__version__}"


# ----------------------------------------------------------------------------- training


class Rival:
    """A model, its optimizer, and how its own loop steps."""

    title: str
    model: Any
    optimizer: Any
    loss: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, config: TrainConfig, device: torch.device, scaler: Any) -> None:
        self.config, self.scaler = config, scaler
        self.compiled = why_not_compile(config.compile, device) is None
        self.run: Any = torch.compile(self.model) if self.compiled else self.model

    def step(self, x: Tensor, y: Tensor, micro: int, autocast: Any,
             mark: Callable[[str], None]) -> Tensor:  # fmt: skip
        """One step as its own loop does it, with the marks of train.train_step."""
        loss = torch.zeros((), device=x.device)
        for mx, my in zip(x.chunk(micro), y.chunk(micro), strict=True):
            mark("forward")
            with autocast:
                part = self.loss(mx, my) / micro
            mark("backward")
            self.scaler.scale(part).backward()
            loss += part.detach()
        mark("update")
        if self.config.grad_clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        mark("end")
        return loss


class NanoGPT(Rival):
    """The model of a nanoGPT checkout, with the optimizer that it configures."""

    def __init__(self, path: str, config: TrainConfig, vocab_size: int, device: torch.device,
                 scaler: Any) -> None:  # fmt: skip
        self.title = "nanoGPT"
        self.model = nanogpt_model(path, config, vocab_size).to(device)
        self.optimizer = self.model.configure_optimizers(
            config.weight_decay, config.learning_rate, (config.beta1, config.beta2), device.type
        )
        super().__init__(config, device, scaler)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)[1]


class HuggingFace(Rival):
    """transformers' GPT-2."""

    def __init__(self, implementation: str, config: TrainConfig, vocab_size: int,
                 device: torch.device, scaler: Any) -> None:  # fmt: skip
        model, self.title = hf_model(implementation, config, vocab_size, device, False)
        self.model = model.to(device)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay, fused=device.type in ("cuda", "cpu"),
        )  # fmt: skip
        super().__init__(config, device, scaler)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # It shifts the labels by itself; the last position then counts for nothing.
        return self.run(input_ids=x, labels=x).loss


# ----------------------------------------------------------------------------- generation


class NanoGPTWriter:
    """nanoGPT's generate(): the whole text is read anew for every token."""

    title = "nanoGPT"

    def __init__(self, path: str, config: TrainConfig, vocab_size: int, device: torch.device,
                 dtype: torch.dtype) -> None:  # fmt: skip
        self.device = device
        self.model = nanogpt_model(path, config, vocab_size).to(device, dtype).eval()

    def write(self, prompt: Tensor, new: int, cache: str,
              processor: Processor | None) -> tuple[float, float, int]:  # fmt: skip
        assert cache == "none" and processor is None
        began: list[float] = []

        def note(module: Any, inputs: Any) -> None:
            if len(began) == 1:  # the first token is drawn, but on a GPU perhaps not there yet
                synchronize(self.device)
            began.append(time.perf_counter())

        # It tells nobody of a token; but where the model is called again, there is one more.
        hook = self.model.register_forward_pre_hook(note)
        try:
            text = self.model.generate(prompt, new, temperature=1.0, top_k=None)
        finally:
            hook.remove()
        synchronize(self.device)
        end = time.perf_counter()
        assert len(began) == new and text.shape[1] == prompt.shape[1] + new, text.shape
        return began[1], end, 0


class HuggingFaceWriter:
    """transformers' generate(), greedy; its streamer is told of every token."""

    def __init__(self, implementation: str, config: TrainConfig, vocab_size: int,
                 device: torch.device, dtype: torch.dtype) -> None:  # fmt: skip
        model, self.title = hf_model(implementation, config, vocab_size, device, True)
        self.model = model.to(device, dtype).eval()
        self.compile = config.compile is True

    def write(self, prompt: Tensor, new: int, cache: str,
              processor: Processor | None) -> tuple[float, float, int]:  # fmt: skip
        from transformers import LogitsProcessorList

        reader = Reader()
        processors: Any = [processor] if processor else []
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False,
            cache_implementation=cache, disable_compile=not self.compile, streamer=reader,
            logits_processor=LogitsProcessorList(processors), return_dict_in_generate=True,
        )  # fmt: skip
        times = reader.times[1:]  # it is told of the prompt first
        assert len(times) == new and found.sequences.shape[1] == prompt.shape[1] + new
        layers = found.past_key_values.layers
        return times[0], times[-1], sum(t.nbytes for x in layers for t in (x.keys, x.values))


class Reader:
    """What transformers takes for a streamer: it notes when it was told something."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
