"""One thread a process: the tests are many tiny tensors, for which more threads only cost."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for subprocesses
