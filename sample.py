"""Prompts in, text out.

python sample.py --out_dir=out/shakespeare_cpu --start="ROMEO:"
python sample.py --init_from=gpt2 --start=FILE:prompt.txt --num_samples=3 --stream=True
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import attention
import checkpoint
import cpu_matmul
import data
from model import GPT
from runtime import pick_device, show_log
from settings import UserError, exit_on_user_error, read


@dataclass(frozen=True)
class SampleConfig:
    """Generate text from a trained model."""

    # --- model ---
    out_dir: str = "out"  # folder of the run to sample from
    init_from: str = "resume"  # resume: out_dir's run; gpt2[-...], a checkpoint, ckpt.pt
    checkpoint: Literal["latest", "best"] = "latest"  # best: the lowest validation loss
    attention_backend: str = "auto"  # a name from python -m attention
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
    attention_hub_kernels: bool = False  # flash_attn_*: download a prebuilt kernel, and run it
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- text ---
    start: str = "\n"  # the prompt, or FILE:prompt.txt; may be given several times
    num_samples: int = 1  # texts for each prompt
    max_new_tokens: int = 500  # tokens to generate; less where the model ends the text
    temperature: float = 0.8  # below 1 plays safe, above dares; 0 takes the likeliest token
    top_k: int | None = 200  # draw from the k likeliest tokens only; none: from all
    top_p: float | None = None  # then from the fewest whose probabilities sum to p; none: from all
    seed: int = 1337  # sample i of a prompt is drawn with seed + i
    stream: bool = False  # print tokens as they come
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def load(config: SampleConfig) -> tuple[GPT, Any]:
    """The model in evaluation mode on its device, and its tokenizer."""
    device = pick_device(config.device)
    changes = {
        "attention_backend": config.attention_backend,
        "attention_fallback": config.attention_fallback,
        "attention_hub_kernels": config.attention_hub_kernels,
        "allow_mps_sdpa": config.allow_mps_sdpa,
        "gradient_checkpointing": False,
    }
    source = config.out_dir if config.init_from == "resume" else config.init_from
    if config.init_from == "resume" or checkpoint.folders(source):
        folder = checkpoint.latest(source)
        if config.checkpoint == "best":
            folder = checkpoint.best_folder(source) or folder
        source = str(folder)
    model = checkpoint.init_model(source, **changes).to(device).eval()
    with torch.no_grad():
        model.attention()  # says what runs, before the text begins
    if device.type == "cpu":
        model.use_onednn(cpu_matmul.why_not() is None)
    meta = checkpoint.tokenizer_meta(source)
    tokenizer = data.GPT2Tokenizer() if meta is None else data.from_meta(meta)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{source} has a vocabulary of {model.config.vocab_size} tokens and no tokenizer of "
            "its own; GPT-2's, which would be used, has more"
        )
    return model, tokenizer


def prompts(config: SampleConfig, argv: list[str]) -> list[str]:
    """Every --start that was given, files read."""
    words = list(zip(argv, [*argv[1:], ""], strict=True))
    starts = [
        word.removeprefix("--start=") if word.startswith("--start=") else after
        for word, after in words
        if word.startswith("--start=") or word == "--start"
    ]
    texts = []
    for start in starts or [config.start]:
        if start.startswith("FILE:"):
            path = Path(start.removeprefix("FILE:"))
            try:
                start = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise UserError(f"the prompt file {path} cannot be read ({e})") from e
        texts.append(start)
    return texts


def complete(
    model: GPT, tokenizer: Any, ids: list[int], config: SampleConfig, i: int
) -> Iterator[int]:
    """The tokens of sample number i."""
    device = model.transformer.wte.weight.device
    generator = torch.Generator(device).manual_seed(config.seed + i)
    for token in model.stream(
        torch.tensor([ids], device=device),
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=generator,
        vocab_size=tokenizer.vocab_size,
    ):
        if (t := int(token)) == tokenizer.eot:
            return
        yield t


def main(argv: list[str]) -> int:
    try:
        return run(argv)
    except attention.BackendUnavailable as e:
        raise UserError(str(e)) from e


def run(argv: list[str]) -> int:
    """Answer every prompt; the exit code."""
    show_log()
    aliases = {"attn_implementation": "attention_backend"}
    config = read(SampleConfig, argv, aliases=aliases).settings
    model, tokenizer = load(config)
    texts = prompts(config, argv)
    encoded = [tokenizer.encode(text) for text in texts]
    if not all(encoded):
        raise UserError("a prompt is empty; leave --start out, or give it a character")
    for text, ids in zip(texts, encoded, strict=True):
        for i in range(config.num_samples):
            tokens = complete(model, tokenizer, ids, config, i)
            print(text, end="", flush=True)
            if config.stream:
                for piece in tokenizer.stream_decode(tokens):
                    print(piece, end="", flush=True)
            else:
                print(tokenizer.decode(list(tokens)), end="")
            print("\n---------------", flush=True)
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
