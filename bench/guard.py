"""Runs a command that ends when its starter does, whatever ends that one (kill -9 too).

    python -IS bench/guard.py COMMAND...      standard input: a pipe that the starter holds open

A process that is killed cannot clean up, but the system closes its pipes. So before it becomes the
command, this process leaves a twin that only waits until nobody holds the other end of the pipe,
and then kills the whole process group: the command, in the middle of a long step too, what it
started (the compile workers of Inductor, and their compilers), and itself.

Not PR_SET_PDEATHSIG: it is Linux's alone, and the command's own children do not inherit it. Not a
thread of the command: it would wait for the GIL, and a process that was killed has none.
"""

import os
import select
import signal
import sys


def watch() -> None:
    """Wait for the end of standard input, without reading what is the command's."""
    os.closerange(1, 256)  # else the command's answers would never end for who reads them
    pipe = select.poll()
    pipe.register(0, 0)  # only what is told unasked: that the other end is closed
    pipe.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if os.getsid(0) != os.getpid():  # else the group would be a shell's
        sys.exit("bench/guard.py is started by bench/process.py, as a session of its own")
    if os.fork() == 0:
        watch()
    os.execvp(sys.argv[1], sys.argv[1:])
