"""One thread a process: the tests are many tiny tensors, for which more threads only cost.

Where there is no CUDA device Triton's kernels run in its interpreter, slowly, on the CPU.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for subprocesses

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
