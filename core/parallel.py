"""How processes share a model: each has all of it (DDP), or each has a part (FSDP2).

ddp   Every process holds the model and its optimizer whole. Gradients are averaged in backward.
fsdp  Every parameter is cut along its first dimension, and a process keeps its part of it, of the
      gradient and of AdamW's moments: 1/N of the memory. A block's parameters are gathered just
      before it computes, forward and again in backward, and freed after it; its gradients are
      averaged and cut as soon as they are there. Also called ZeRO-3 (Rajbhandari et al. 2020,
      arXiv 1910.02054). With fewer parts than processes it is hybrid: each group of that many
      neighbours holds one copy, and gradients are averaged between the groups.

In bfloat16 FSDP gathers the blocks in bfloat16 and adds up gradients in float32; what lies outside
the blocks (embeddings and the last norm) is gathered in float32, so that the residual stream is as
without FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from attention import Ring
from core.distributed import DistInfo
from core.loss import IGNORE
from core.runtime import CUDA_GRAPHS, Setup
from core.settings import UserError

BUCKET_MB = 100  # of gradients that DDP sends at once; PyTorch's own is 25


def replicate(module: Any, distributed: DistInfo) -> Any:
    """The module, plain or compiled, its gradients averaged over all processes in backward (DDP).

    PyTorch cuts a compiled module's graph at the borders of the buckets, so that a bucket is
    sent while the rest of backward runs. Larger buckets are fewer and longer graphs.
    """
    if distributed.world_size == 1:
        return module
    if isinstance(module, torch._dynamo.OptimizedModule) and not _can_cut():
        torch._dynamo.config.optimize_ddp = False
    device = distributed.device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        module, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
    )


def shard(model: Any, distributed: DistInfo, setup: Setup, size: int | None) -> None:
    """Leave this process its part of the model's parameters, on the run's device (FSDP2).

    For a model on the CPU, so that no GPU ever holds more than a block of it whole. With
    torch.compile each block is compiled separately.

    Args:
        size: processes that hold one copy together; None: all.

    Raises:
        UserError: for what does not go together.
    """
    n = distributed.world_size
    if distributed.control is None:
        raise UserError(
            "--parallel=fsdp shares the weights among processes: torchrun --nproc_per_node=2 "
            "train.py ...; one alone takes --parallel=ddp"
        )
    size = n if size is None else size
    if n % size:
        raise UserError(f"--shard_size={size} does not divide the {n} processes")
    if setup.dtype == torch.float16:
        raise UserError("--parallel=fsdp has no loss scaling: take --dtype=bfloat16 or float32")
    if setup.compile and setup.compile_mode in CUDA_GRAPHS:
        raise UserError(
            f"--compile_mode={setup.compile_mode} takes CUDA graphs, which cannot hold FSDP's "
            "gathered parameters; take default or max-autotune-no-cudagraphs"
        )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as e:
        raise UserError(f"--parallel=fsdp needs torch >= 2.6, this is {torch.__version__}") from e
    kind = distributed.device.type
    names = ("replicate", "shard")
    mesh = init_device_mesh(kind, (n // size, size), mesh_dim_names=names)
    mesh = mesh["shard"] if size == n else mesh
    half: dict[str, Any] = {}
    if setup.dtype == torch.bfloat16:
        # Inputs stay as they are: autocast says what is computed in which dtype.
        half["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.transformer.h:
        if setup.compile:
            block.compile(mode=setup.compile_mode)
        fully_shard(block, mesh=mesh, **half)
    fully_shard(model, mesh=mesh)


def ring(distributed: DistInfo, T: int) -> Ring | None:
    """The ring that this process shares sequences of T tokens with, if it does.

    Raises:
        UserError: they are too short for all to have a token.
    """
    if distributed.ring is None:
        return None
    if (n := distributed.context_parallel) > T:
        raise UserError(f"--context_parallel={n} processes cannot share --block_size={T} tokens")
    return Ring(distributed.ring)


def shard_batch(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cut (B, T) tokens and targets along T for context parallelism."""
    ring = model.ring
    return (x, y) if ring is None else (ring.shard(x, 0), ring.shard(y, IGNORE))


def loss_weight(model: Any, T: int) -> float:
    """Weight of this process's mean loss in its ring: N times its share of the T tokens."""
    return model.ring.weight(T) if model.ring else 1.0


def no_sync(module: Any) -> AbstractContextManager[Any]:
    """A context in which backward adds up gradients and sends none: of all micro-batches of a step
    but the last."""
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return _quiet(module) if is_sharded(module) else nullcontext()


@contextmanager
def _quiet(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def reshard(module: Any) -> None:
    """Free what FSDP keeps gathered after a forward pass, where no backward pass comes."""
    if is_sharded(module):
        module.reshard()


def is_sharded(module: Any) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def whole(t: Tensor) -> Tensor:
    """Return the full tensor of one that may be sharded. All processes must call it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def held(model: nn.Module) -> str:
    """A line that says what this process keeps, its gradients within a step only."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    n = sum(4 * p.numel() * p.element_size() for p in parts)
    how = " (fsdp)" if is_sharded(model) else ""
    return f"memory: {n / 1e6:,.1f} MB a process of weights, gradients and AdamW's moments{how}"


def _can_cut() -> bool:
    """Whether this PyTorch can cut a graph that holds an autograd.Function, as our loss
    does: some releases refuse it (PyTorch issue 104674)."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    return "has_higher_order_op" not in DDPOptimizer.compile_fn.__code__.co_names
