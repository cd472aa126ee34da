"""A regular expression's automaton over tokens, in its own process: nothing interrupts the library.

regular expression  ->  automaton over bytes  ->  automaton over tokens
                          (n states, 256)           (n states, classes)
"""

from __future__ import annotations

import pickle
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, reduce
from typing import Any

import numpy as np

DEAD, END, START = 0, 1, 2
NEVER = 2**31 - 1  # tokens to no match
SECONDS = 15
GIGABYTES = 4
STATES = 2**17
ENTRIES = 2**27  # of the table
TOO_LARGE = 3
# An escape, a class, a count, the start of a group, or another character.
PIECE = re.compile(
    r"\\[pPx]\{\w*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\{\d+(?:,\d*)?\}"
    r"|\(\?(?:<?[=!]|P=|[>#(])|.",
    re.DOTALL,
)
UNSUPPORTED = re.compile(r"[\^${]|\\[AzbBZ1-9]|\(\?.*", re.DOTALL)

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]


def build(pattern: str, tokens: Sequence[bytes], stop: Sequence[int]) -> Tables:
    """Tables of an expression over `tokens`, ended by `stop`. Raises ValueError."""
    sent = pickle.dumps((pattern, [*tokens], [*stop]))
    why = f"it needs more than {SECONDS} seconds of a core, {GIGABYTES} GB or {STATES:,} states"
    with suppress(subprocess.TimeoutExpired):  # the process limits the processor's time
        done = subprocess.run(
            [sys.executable, __file__], input=sent, capture_output=True, timeout=4 * SECONDS
        )
        if done.returncode == 0:
            tables: Tables = pickle.loads(done.stdout)
            return tables
        if done.returncode > 0 and done.returncode != TOO_LARGE:
            why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise ValueError(f"the regex {pattern!r:.100}: {why}")


def main() -> None:
    """The process of build(): errors go to the last line of stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limits = {"CPU": SECONDS, "AS": GIGABYTES * 2**30, "CORE": 0}
    for name, most in limits.items():
        with suppress(ValueError, OSError):  # macOS
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    try:
        pickle.dump(tables_of(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
    except MemoryError:
        sys.exit(TOO_LARGE)
    except ValueError as e:
        sys.exit(str(e))


def tables_of(pattern: str, tokens: list[bytes], stop: list[int]) -> Tables:
    table_of_bytes, accepts = over_bytes(pattern)
    step, token_class = over_tokens(table_of_bytes, tokens)  # (n, classes), (V,)
    least = np.where(accepts, 0, NEVER).astype(np.int32)
    while (near := (least == NEVER) & (least[step].min(1) < NEVER)).any():
        least[near] = least[step[near]].min(1) + 1
    alive = least < NEVER
    if not alive[step[0]].any():
        raise ValueError(f"it matches no text of the model's {len(tokens)} tokens but ''")
    renamed = np.where(alive, START + np.cumsum(alive) - 1, DEAD)
    ends = np.where(accepts[alive], END, DEAD)
    columns = [np.zeros_like(ends), *renamed[step[alive]].T]  # no token, classes
    token_class = token_class + 1
    if stop:
        token_class[stop] = len(columns)
        columns.append(ends)
    return table(np.stack(columns, 1), token_class, least[alive])


def table(allowed: np.ndarray, token_class: np.ndarray, least: Any) -> Tables:
    """Next states (states, classes), classes (V,), fewest tokens to a match (states,)."""
    # Columns may differ in removed states only.
    columns, same = np.unique(allowed, axis=1, return_inverse=True)
    transition = np.pad(columns, ((START, 0), (0, 0)), constant_values=DEAD).astype(np.int32)
    transition[END] = END
    return transition, same.reshape(-1)[token_class], np.array([NEVER, 0, *least], dtype=np.int32)


def over_bytes(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Next states (n, 256), and (n,) True if accepting; the first is the start, the last is dead.

    outlines-core 0.2.14 stops at the first match ("a|ab" never matches "ab"): a NUL follows the
    pattern, and a state accepts if NUL is possible. It tracks matches that begin later, so an empty
    alternative matches at the start, and loses steps into the state after it: a NUL precedes.
    """
    try:
        import outlines_core as outlines
    except ImportError as e:
        raise ValueError(f"constraints need: pip install outlines-core ({e})") from e
    pieces = [*PIECE.finditer(pattern)]
    pieces = pieces[pattern[:1] == "^" :]
    pieces = pieces[: len(pieces) - (pieces != [] and pieces[-1][0] == "$")]
    for piece in pieces:
        if UNSUPPORTED.fullmatch(piece[0]):
            raise ValueError(f"{piece[0]} at position {piece.start()} is not supported")
    inside = "".join(piece[0] for piece in pieces)
    tokens = {bytes([b]): [b] for b in range(256)} | {bytes([0, b]): [256 + b] for b in range(256)}

    def check(part: str) -> None:
        outlines.Index(f"{part}|", outlines.Vocabulary(1, {b"\xff": [0]}))  # no byte of UTF-8

    try:
        check(inside)  # first: "a)(b" is an error, "(?:a)(b)" is not
        index = outlines.Index(f"\\x00(?:{inside})\\x00|", outlines.Vocabulary(512, tokens))
    except ValueError as e:
        raise ValueError(_fault(pattern, check) or e) from e
    found, finals = index.get_transitions(), index.get_final_states()
    if len(found) > STATES:
        raise MemoryError
    start = found.get(index.get_initial_state(), {})
    rows = [{t - 256: state for t, state in start.items() if 256 <= t < 512}, *found.values()]
    number = {state: i for i, state in enumerate(found, 1)}
    steps = np.full((len(rows) + 1, 256), len(rows), dtype=np.int32)
    for i, row in enumerate(rows):
        for byte, state in row.items():
            if 0 < byte < 256:
                steps[i, byte] = number.get(state, len(rows))
    return steps, np.array([*(row.get(0) in finals for row in rows), False])


def _fault(pattern: str, check: Callable[[str], object]) -> str:
    """Locate a fault by check() of each piece, then as Python's, whose syntax is nearly Rust's."""
    for piece in PIECE.finditer(pattern):
        try:
            check(piece[0] if len(piece[0]) > 1 and piece[0][0] in "\\[" else "")
        except ValueError:
            return f"{piece[0]} at position {piece.start()} is invalid"
    rusty = re.sub(r"\\[pP](\w|\{\w+\})", lambda found: "x" * len(found[0]), pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(rusty)
    except re.error as e:
        return f"{e.msg} at position {e.pos}"
    return ""


def over_tokens(steps: np.ndarray, tokens: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Next states (n, classes) and classes (V,), by the transition monoid."""
    maps = [np.arange(len(steps), dtype=np.int32)]  # state -> next state
    number = {maps[0].tobytes(): 0}

    @cache
    def composed(at: int, byte: int) -> int:
        after = steps[maps[at], byte]
        if (n := number.setdefault(after.tobytes(), len(maps))) == len(maps):
            maps.append(after)
            if after.size * len(maps) > ENTRIES:
                raise MemoryError
        return n

    of_token = [reduce(composed, token, 0) if token else -1 for token in tokens]
    maps.append(np.full_like(maps[0], len(steps) - 1))
    used, token_class = np.unique(of_token, return_inverse=True)
    return np.stack([maps[i] for i in used], axis=1), token_class.reshape(-1)


if __name__ == "__main__":
    main()
