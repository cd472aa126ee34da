"""Options of a model and of its training, without torch: --help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from core.settings import Size, check_fields

if TYPE_CHECKING:
    from attention import Policy

ResidualDtype = Literal["auto", "float32", "autocast"]  # autocast: --dtype
VocabSize = Annotated[int, Field(ge=1, le=2**32)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
PeakRate = PositiveFloat | Literal["measure"]  # TFLOP/s of one device
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
IGNORED = {"always_save_checkpoint": "every evaluation saves",
           "backend": "NCCL on CUDA, gloo elsewhere"}  # fmt: skip  # nanoGPT's names


@dataclass(frozen=True)
class ModelOptions:
    """Shared by GPTConfig and the commands, in nanoGPT's order."""

    block_size: Size = 1024  # context length, tokens
    vocab_size: VocabSize | None = None  # none: the dataset's; beyond 1024 to a multiple of 64
    n_layer: Size = 12  # blocks
    n_head: Size = 12  # query heads
    n_embd: Size = 768  # channels of the residual stream
    n_kv_head: Size | None = None  # key/value heads; none: n_head
    dropout: float = 0.0  # probability; 0 for pretraining, 0.1 or more for finetuning
    bias: bool | Literal["qkv"] = False  # in Linear and LayerNorm; qkv: of q, k and v alone
    gelu: Literal["exact", "tanh"] = "exact"  # GPT-2's checkpoints use tanh
    position: Literal["learned", "rope", "alibi"] = "learned"  # alibi: no vectors, biased scores
    norm: Literal["layer", "rms"] = "layer"  # rms: no mean, no bias (Zhang & Sennrich 2019)
    mlp: Literal["gelu", "swiglu"] = "gelu"  # swiglu: with a gate, as many parameters
    qk_norm: bool = False  # RMSNorm of each query and key, as in Qwen3
    tied: bool = True  # the head uses the token embedding's weights (Press & Wolf 2017)
    attention_backend: str = "auto"  # a name (python -m attention), or code (docs/KERNEL.md)


@dataclass(frozen=True)
class TrainConfig(ModelOptions):
    """Train a GPT on a prepared dataset (python -m data)."""

    # --- run ---
    out_dir: str = "out/gpt"  # for checkpoints, metrics.jsonl, loss.png
    init_from: str = "scratch"  # scratch, resume, gpt2[-xl...], a checkpoint or ckpt.pt
    eval_interval: PositiveInt = 2000  # steps between evaluations, each with a checkpoint
    eval_iters: PositiveInt = 200  # batches in an evaluation, always the same
    eval_on_start: bool = False  # also before the first step
    eval_only: bool = False  # evaluate, print, and stop
    log_interval: PositiveInt = 10  # steps between log lines
    profile_step: PositiveInt | None = None  # step to profile: a table, and a trace in out_dir
    keep_checkpoints: PositiveInt = 2  # newest checkpoints to keep, besides the best
    sample_tokens: NonNegativeInt = 0  # tokens of text to print at the end
    wandb_log: bool = False  # to Weights & Biases too (pip install wandb)
    wandb_project: str = "nanoattn"  # its project name
    wandb_run_name: str = "gpt"  # its run name
    # --- data ---
    dataset: str = "openwebtext"  # a folder in data_dir (python -m data)
    data_dir: str = "data"  # folder of the prepared datasets
    batch_size: PositiveInt = 12  # largest micro-batch per process, sequences
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches per step, over all processes
    document_mask: bool = False  # no token sees another document
    # --- model ---
    gradient_checkpointing: bool = False  # recompute blocks: less memory, slower
    residual_dtype: ResidualDtype = "auto"  # between blocks; auto: autocast in bfloat16 on CUDA
    # --- attention ---
    attention_window: tuple[PositiveInt | None, ...] = (None,)  # keys per query; A,B: by layer
    attention_fallback: bool = True  # False: an unavailable backend is an error
    attention_hub_kernels: bool = False  # flash_attn_*, hub:...: download and run
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- optimizer ---
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices (docs/TRAIN.md)
    muon_rates: tuple[PositiveFloat, ...] = (0.025,)  # highest: matrices,embeddings,head,vectors
    max_iters: PositiveInt = 600000  # total steps
    learning_rate: PositiveFloat = 6e-4  # after warm-up
    min_lr: NonNegativeFloat | None = None  # at the end; none: learning_rate / 10
    decay_lr: bool | Literal["linear"] = True  # cosine or linear decay; False: none, no warm-up
    warmup_iters: NonNegativeInt = 2000  # steps of linear warm-up
    lr_decay_iters: NonNegativeInt | None = None  # when min_lr is reached; none: max_iters
    weight_decay: NonNegativeFloat = 0.1  # of matrices; with muon of the blocks'
    beta1: Fraction = 0.9  # AdamW
    beta2: Fraction = 0.95  # AdamW
    grad_clip: NonNegativeFloat = 1.0  # largest global gradient norm; 0: no clipping
    # --- many processes (torchrun; docs/SCALE.md) ---
    parallel: Literal["ddp", "fsdp"] = "ddp"  # copies of the model, or shards (FSDP2)
    shard_size: PositiveInt | None = None  # fsdp: processes per copy; none: all
    context_parallel: PositiveInt = 1  # processes per sequence (attention/ring.py)
    async_checkpoint: bool = False  # write checkpoints in the background
    hang_timeout: PositiveFloat = 45.0  # seconds without progress until all end
    # --- machine ---
    device: str = "auto"  # auto (cuda, mps, cpu), cpu, cuda, cuda:1, mps
    dtype: Dtype = "auto"  # of matrix products; auto: bfloat16 or float16 in hardware
    tf32: bool = True  # float32 products on CUDA in TF32
    compile: bool | None = None  # torch.compile; none: on CUDA where Triton is there
    compile_mode: CompileMode = "default"  # CUDA graphs, tuned kernels, or both
    onednn: bool | None = None  # CPU: float32 products by oneDNN; none: on AMD with AVX-512
    deterministic: bool = False  # the same bits each time; slower on CUDA
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1337  # of weights, batches and dropout
    peak_tflops: PeakRate | None = None  # for MFU; none: datasheet or measured; measure: again

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shard_size is not None and self.parallel != "fsdp":
            raise ValueError(f"shard_size={self.shard_size} needs --parallel=fsdp")
        if (self.profile_step or 0) > self.max_iters:
            step = f"profile_step={self.profile_step}"
            raise ValueError(f"{step}: expected at most max_iters={self.max_iters}")
        others = self.optimizer != "muon" and self.muon_rates != TrainConfig.muon_rates
        if others or not 1 <= len(self.muon_rates) <= 4:
            got = f"got {self.muon_rates} with {self.optimizer}"
            raise ValueError(f"muon_rates: expected one to four, with --optimizer=muon; {got}")

    @property
    def global_batch(self) -> int:
        """Sequences per step, over all processes and micro-batches."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def policy(self) -> Policy:
        from attention import Policy

        return Policy(self.attention_fallback, self.attention_hub_kernels, self.allow_mps_sdpa)
