"""Runs a command that ends when its parent does, however that ends (even by kill -9).

    python -IS bench/guard.py COMMAND...      standard input: a pipe that the parent holds open

A killed process cannot clean up, but the system closes its pipes. So before it becomes the command,
this process forks a watcher that waits until nobody holds the other end of the pipe, and then kills
the whole process group: the command, even in the middle of a long step, what it started (the
compile workers of Inductor, and their compilers), and itself.

Not PR_SET_PDEATHSIG: it exists only on Linux, and the command's children do not inherit it. Not a
thread of the command: it would wait for the GIL, and does not survive a kill.
"""

import os
import select
import signal
import sys


def watch() -> None:
    """Wait for the end of standard input, without reading the command's data."""
    os.closerange(1, 256)  # else readers of the command's output would never see its end
    pipe = select.poll()
    pipe.register(0, 0)  # only the hang-up, which is always reported
    pipe.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if os.getsid(0) != os.getpid():  # else the group is a shell's
        sys.exit("bench/guard.py is started by bench/process.py, as a session of its own")
    if os.fork() == 0:
        watch()
    os.execvp(sys.argv[1], sys.argv[1:])
