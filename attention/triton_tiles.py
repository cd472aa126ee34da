"""triton with other backward kernels: triton:dq64-dkdv128, which "fastest" measures, triton:tma."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from .caps import Backend
from .triton_flash import BACKEND, WHOLE, attend

# Queries, keys, warps and stages. At a head_dim up to 64 they fit every GPU from 8.0 on.
BACKWARD_TILES = ((64, 64, 4, 3), (128, 64, 8, 3))


def other(name: str, about: str, capability: tuple[int, int], head_dim: int,
          **options: Any) -> Backend:
    """triton with `options` of its backward(), in half precision."""
    kernel = replace(WHOLE, backward=partial(WHOLE.backward, **options))
    caps = replace(BACKEND.caps[0], dtypes=("float16", "bfloat16"), min_capability=capability,
                   head_dim_max=head_dim, head_dim_multiple=8, lse=False)
    interpreted = replace(caps, devices=("cpu",), min_capability=None, interpreted=True,
                          dtypes=("float16",))
    return replace(BACKEND, name=f"triton:{name}", title=f"{BACKEND.title}, {about}",
                   attend=partial(attend, kernel=kernel), caps=(caps, interpreted),
                   fallback="triton", partial=None)


TILED = tuple(
    other(f"dq{dq[0]}-dkdv{dkdv[0]}", f"backward tiles {dq} and {dkdv}", (8, 0), 64,
          tiles=[*dq, *dkdv])
    for dq, dkdv in product(BACKWARD_TILES, repeat=2))
# Not measured by "fastest" until a GPU has run it (bench/gpu_levers.sh).
TMA = other("tma", "backward by TMA descriptors", (9, 0), 128, tma=True)
