"""The cache of a model's kernels: each is chosen, probed and announced once."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from .caps import Resolution
from .machine.autotune import Shape, fastest
from .select import announce, select
from .spec import Policy, Spec


class Choices:
    """The resolutions of one backend name, by the caller's key."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name, self.policy = name, policy
        self.known: dict[Hashable, tuple[Resolution, Spec]] = {}

    def choose(
        self, key: Hashable, spec: Spec, device: str | torch.device, shape: Shape, phase: str = ""
    ) -> Resolution:
        """Choose the kernel for `spec` and remember it under `key`.

        Args:
            shape: sequences, queries and keys of a call: "fastest" measures at it.
            phase: announced after the backend's name if the Spec is for inference.

        Raises:
            BackendUnavailable: refused, with no fallback left or allowed.
        """
        B, Tq, Tk = shape
        if self.name == "fastest" and (Tq == Tk or not spec.grad):
            chosen = fastest(spec, device, shape, self.policy)
        else:
            chosen = select(self.name, spec, device, self.policy, shape=(B, Tk))
        announce(chosen, "" if spec.grad else phase)
        self.known[key] = chosen, spec
        return chosen
