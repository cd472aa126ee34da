"""Other people's GPT-2 at the same sizes, in the same rounds, so that a ratio can be claimed.

    --rival nanogpt=PATH    karpathy/nanoGPT: the model.py of the checkout in PATH is imported from
                            there, and stepped as its train.py does
    --rival hf              transformers' GPT2LMHeadModel with its own attention implementations:
                            hf_eager, hf_sdpa and, where it is installed, hf_flash_attention_2,
                            stepped as its Trainer does (fused AdamW, gradients clipped)

Nothing of them is copied here. A model that cannot have what was asked (grouped-query heads, a
window) says so and is not measured. transformers' GPT-2 always has biases: a few thousandths more
parameters; its MFU is reckoned with the same FLOPs as everyone's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import why_not_compile
from settings import UserError
from train import TrainConfig

HF = ("eager", "sdpa", "flash_attention_2")


def contenders(asked: tuple[str, ...]) -> dict[str, str]:
    """--rival's words -> {name of the row: what build() wants}.

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
            found |= {f"hf_{a}": f"hf={a}" for a in HF}
        else:
            raise UserError(f"--rival is nanogpt=PATH or hf, got {word!r}")
    return found


def build(rival: str, config: TrainConfig, vocab_size: int, device: torch.device,
          autocast: Any, scaler: Any) -> Any:  # fmt: skip
    """The rival's model and optimizer.

    Raises:
        UserError: it cannot do what is asked.
    """
    name, _, what = rival.partition("=")
    wanted = {
        "attention_window": config.attention_window,
        "n_kv_head": None if config.n_kv_head == config.n_head else config.n_kv_head,
        "gradient_checkpointing": config.gradient_checkpointing or None,
        "gelu=tanh": (config.gelu == "tanh" and name == "nanogpt") or None,
    }
    if lacks := [k for k, v in wanted.items() if v is not None]:
        raise UserError(f"it has no {' and no '.join(lacks)}")
    kind = NanoGPT if name == "nanogpt" else HuggingFace
    return kind(what, config, vocab_size, device, scaler)


class Rival:
    """A model, its optimizer, and how its own loop steps."""

    title: str
    model: Any
    optimizer: Any

    def __init__(self, config: TrainConfig, device: torch.device, scaler: Any) -> None:
        self.config, self.scaler = config, scaler
        self.compiled = why_not_compile(config.compile, device) is None
        self.run: Any = torch.compile(self.model) if self.compiled else self.model

    def update(self, loss: Tensor) -> None:
        if self.config.grad_clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class NanoGPT(Rival):
    """The model of a nanoGPT checkout, with the optimizer that it configures."""

    def __init__(self, path: str, config: TrainConfig, vocab_size: int, device: torch.device,
                 scaler: Any) -> None:  # fmt: skip
        spec = importlib.util.spec_from_file_location("nanogpt_model", path)
        assert spec and spec.loader
        theirs = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = theirs  # its dataclass looks itself up there
        spec.loader.exec_module(theirs)
        same = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
        sizes = {name: getattr(config, name) for name in same}
        self.title = "nanoGPT"
        self.model = theirs.GPT(theirs.GPTConfig(vocab_size=vocab_size, **sizes)).to(device)
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
        if importlib.util.find_spec("transformers") is None:
            raise UserError("package 'transformers' is not installed (pip install transformers)")
        import transformers

        if implementation == "flash_attention_2" and device.type != "cuda":
            raise UserError(f"flash_attention_2 runs on cuda, not on {device.type}")
        settings: Any = transformers.GPT2Config(
            vocab_size=vocab_size, n_positions=config.block_size, n_embd=config.n_embd,
            n_layer=config.n_layer, n_head=config.n_head, resid_pdrop=config.dropout,
            embd_pdrop=config.dropout, attn_pdrop=config.dropout, use_cache=False,
            activation_function="gelu" if config.gelu == "exact" else "gelu_new",
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        try:
            self.model = transformers.AutoModelForCausalLM.from_config(
                settings, attn_implementation=implementation
            ).to(device)
        except ImportError as e:
            raise UserError(" ".join(str(e).split())) from e
        self.model.train()
        self.title = f"transformers {transformers.__version__}"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay, fused=device.type in ("cuda", "cpu"),
        )  # fmt: skip
        super().__init__(config, device, scaler)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # It shifts the labels by itself; the last position then counts for nothing.
        return self.run(input_ids=x, labels=x).loss
