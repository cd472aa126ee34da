"""Candidates in turn: A B C A B C, each in its own process (bench/worker.py).

A candidate's first turn is set-up, warm-up and a round; a drifting clock affects all alike. If the
sleeping workers do not fit into memory together, every round gets a new process ("fresh"). What
fails is a row with its reason.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from attention import Spec
from bench import Json, hf, report, tables
from bench.config import BenchConfig
from bench.machine import refused
from bench.process import Failure, Stop, Worker
from bench.tables import Row
from core import flops

Skip = Callable[[str, Json], str]  # of a name and a point: why it is not measured, or ""
FIRST = 0.65  # share of the time until a deadline after which no candidate begins


class Progress:
    """Plain lines on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def watch(self, what: str) -> None:
        """Print at most every two seconds."""
        if time.monotonic() - self.last >= 2:
            self.last = time.monotonic()
            self.tell(what)


@dataclass
class Run:
    """A run of one mode, or a stage of qualify."""

    mode: str
    config: BenchConfig
    device: str
    backends: list[str]
    left_out: dict[str, str]  # of them, not to be measured: reasons
    part: Json  # what a record says: machine, vocab_size, hf, reference, rows
    stop: Stop = field(default_factory=Stop)
    progress: Progress = field(default_factory=Progress)
    save: Callable[[Run], object] = lambda run: None  # after each round
    refused: dict[str, list[str]] = field(default_factory=dict)  # backends, with reasons
    began: float = field(default_factory=time.perf_counter)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def model(self) -> flops.Sizes:
        """GPTConfig, or the sizes of the model of --hf."""
        return hf.model_of(self.content())

    @property
    def layer(self) -> Json:
        """Return the fields of the first attention layer's Spec."""
        model = self.model
        own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
        return own | (model.layers[0] if "hf" in self.part else {"window": model.windows[0]})

    def refuse(self, fields: list[Json]) -> None:
        """Note the backends that support none of the Specs with these fields; they are not
        started."""
        m, policy = self.part["machine"], replace(self.config.policy, fallback=False)
        specs = [Spec(**{"dtype": m["dtype"], **spec}) for spec in fields]
        self.refused = refused(self.backends, specs, m, policy)
        self.refused |= {name: [why] for name, why in self.left_out.items()}

    def content(self, why: str = "") -> Json:
        """Return the content of the record so far; `why`: the reason if it is incomplete."""
        rows = self.part["rows"]
        none = sum(r["status"] == "stopped" for r in rows)
        why = why or self.stop.why or ("the time limit was reached" if none else "")
        content = {**self.part, "mode": self.mode, "settings": self.config.flat()}
        content |= {"seconds": time.perf_counter() - self.began, "complete": not why}
        content["machine"] = dict(self.part["machine"])  # look_again() changes it
        if why:
            planned = report.planned(self.mode, content["settings"])
            few = sum(r["status"] == "ok" and len(r["rounds"]) < planned for r in rows)
            missing = [f"{none} of {len(rows)} rows were not measured"] if none else []
            missing += [f"{few} have fewer than {planned} rounds"] if few else []
            content["incomplete"] = "; ".join([why, *missing])
        return content

    def job(
        self, kind: str, name: str = "", batch_size: int = 1, rival: str = "", **changes: object
    ) -> Json:
        """Return a worker's job: `kind` is one of bench/worker.py's WORK.

        `name` is the row, without a rival also the attention backend; `rival` an argument of
        candidates.build(); `changes` are of train.py's settings.
        """
        ours = {"attention_backend": name} if name and not rival else {}
        changes = {**ours, "attention_fallback": False, **changes}
        limit = self.part["machine"].get("memory_limit")
        return {
            "job": kind,
            "name": name,
            "rival": rival,
            "train": asdict(self.config.training(batch_size=batch_size, **changes)),
            "device": self.device,
            "vocab_size": self.part["vocab_size"],
            "hf": self.part.get("hf", {}).get("config"),
            "weights": self.config.weights,
            "memory_limit": None if self.cuda else limit,
            "bandwidth_gbs": self.config.bandwidth_gbs,
            "wants_bandwidth": self.mode in ("decode", "qualify") or self.config.profile,
        }

    def ask_once(self, kind: str, batch_size: int = 1) -> Json:
        """Set up a job in a worker and return its answer."""
        self.progress.watch(f"the {kind}")
        worker = self.worker(self.job(kind, batch_size=batch_size))
        worker.close()
        return worker.about

    def worker(self, job: Json) -> Worker:
        return Worker(job, self.config.timeout, self.stop)

    def measure(
        self,
        jobs: Mapping[str, Json],
        points: Sequence[Json] = ({},),
        request: Mapping[str, object] = {},
        *,
        rounds: int = 0,
        fresh: bool | None = None,
        skip: Skip = lambda name, point: "",
    ) -> list[Row]:
        """Measure every job at every point; return the rows, also in part["rows"].

        Rows that are there already get further rounds.

        Args:
            jobs: name of the row -> the worker's job; points: what differs between rows.
            request: what all rounds ask besides the point; rounds: instead of --rounds.
            fresh: new processes in every round; None: only if they do not all fit into memory.
            skip: returns why a pair is not measured, or "".
        """
        turns = Turns(self, jobs, dict(request), fresh, skip)
        rounds = rounds or self.config.rounds
        pairs = list(itertools.product(points, jobs))
        for point, name in pairs:
            row = turns.row(name, point)
            if name in self.refused:
                row |= {"status": "unavailable", "why": self.refused[name]}
            if row["status"] not in ("ok", "stopped"):
                turns.ended.add((name, str(point)))
        try:
            for round_ in range(rounds):
                for n, (point, name) in enumerate(pairs, 1):
                    doing = f"round {round_ + 1} of {rounds}" if round_ else "the first round"
                    what = tables.where(point, name)
                    self.progress.watch(f"{doing}: {what} ({n} of {len(pairs)})")
                    turns.take(name, point, round_)
                if not self.stop.why:
                    self.save(self)
        finally:
            turns.drop(*turns.workers)
        self.part["fresh_rounds"] = self.part.get("fresh_rounds", False) or bool(turns.fresh)
        return self.part["rows"]


class Turns:
    """The workers of a measurement."""

    def __init__(
        self, run: Run, jobs: Mapping[str, Json], request: Json, fresh: bool | None, skip: Skip
    ) -> None:
        self.run, self.jobs, self.request, self.fresh, self.skip = run, jobs, request, fresh, skip
        self.workers: dict[str, Worker] = {}
        self.held: dict[str, int] = {}  # bytes of a sleeping worker
        self.peak = 0  # the most that any worker needed
        self.warm: set[tuple[str, str]] = set()  # pairs that their worker has warmed up
        self.ended: set[tuple[str, str]] = set()  # pairs without further rounds
        self.told: set[str] = set()
        deadline = run.stop.deadline
        now = time.monotonic()
        self.begin_by = None if deadline is None else now + FIRST * (deadline - now)

    def row(self, name: str, point: Json) -> Row:
        """Return the row of a pair; a new one was not measured yet."""
        rows = self.run.part["rows"]
        for row in rows:
            if row["backend"] == name and row["point"] == point:
                return row
        why = ["no round was measured yet"]
        rows.append(
            {
                "mode": self.run.mode,
                "backend": name,
                "point": point,
                "status": "stopped",
                "why": why,
                "rounds": [],
            }
        )
        return rows[-1]

    def drop(self, *names: str) -> None:
        for name in [*names]:
            if name in self.workers:
                self.workers.pop(name).close()
            self.held.pop(name, None)
            self.warm = {pair for pair in self.warm if pair[0] != name}

    def take(self, name: str, point: Json, round_: int) -> None:
        """Let a candidate measure its next round, or note in its row why it does not."""
        pair, row, what = (name, str(point)), self.row(name, point), tables.where(point, name)
        if pair in self.ended:
            return
        try:
            self.run.stop.check()
            self._round(name, point, row, round_)
            row["status"] = "ok"
            row.pop("why", None)
            if round_ == 0:
                self.run.progress.tell(f"{what}: {row['rounds'][-1]['ms']:.4g} ms")
        except Failure as e:
            n = 1 if row["rounds"] else row.get("batch_size", 1)
            if self.request.get("auto") and "out of memory" in str(e) and n > 1:
                row["batch_size"] = n * 3 // 4  # several steps need more than one
                self.drop(name)
                return self.take(name, point, round_)
            no_size = bool(self.request.get("auto")) and e.kind == "failed"  # at this point
            lives = name in self.workers or e.kind == "skipped" or no_size
            others = [p for p in self.run.part["rows"] if p["backend"] == name and not p["rounds"]]
            # A job that cannot begin has no other points.
            for other in [row] if lives or row["rounds"] else others:
                self.ended.add((name, str(other["point"])))
                if e.kind != "stopped" or other["status"] != "ok":  # its rounds so far count
                    kind = "failed" if e.kind == "died" else e.kind
                    other |= {"status": kind, "why": list(e.why)}
            if e.kind == "died":
                self.drop(name)
            if e.kind != "stopped" and str(e) not in self.told:
                self.told.add(str(e))
                self.run.progress.tell(f"{what}: {e.kind}: {e}")
        limit = 0.9 * self.run.part["machine"]["memory_limit"]
        if self.fresh is None and limit and sum(self.held.values()) + self.peak > limit:
            self.fresh = True
        if self.fresh:
            self.drop(*self.workers)

    def _round(self, name: str, point: Json, row: Row, round_: int) -> None:
        if round_ == 0 and (why := self.skip(name, point)):
            raise Failure("skipped", [why])
        begun = any(other["rounds"] for other in self.run.part["rows"])
        if round_ == 0 and begun and self.begin_by and time.monotonic() > self.begin_by:
            raise Failure("stopped", ["its warm-up would have left no time for the rounds"])
        asked = {**point, **self.request}
        if asked.get("auto") and "batch_size" not in row:
            # In a process of its own, whose memory is in pieces afterwards.
            finder = self.run.worker(self.jobs[name])
            try:
                row["batch_size"] = finder.ask({**asked, "largest": True})["batch_size"]
            finally:
                finder.close()
        if name not in self.workers:
            self.workers[name] = self.run.worker(self.jobs[name])
        worker = self.workers[name]
        asked["batch_size"] = row.get("batch_size")
        if (name, str(point)) not in self.warm:
            self.warm.add((name, str(point)))
            began = time.perf_counter()
            warm = worker.ask({**asked, "warm_up": True, "again": bool(row["rounds"])})
            if round_ == 0 and not row["rounds"]:
                row |= {**worker.about, **warm, "setup_s": worker.setup_s}
                row["warm_up_s"] = time.perf_counter() - began
            self._seen(name, row, warm)
        answer = worker.ask(asked)
        self._seen(name, row, answer)
        row["rounds"].append(answer)

    def _seen(self, name: str, row: Row, answer: Json) -> None:
        """Note the memory of an answer."""
        self.held[name] = answer.pop("held_bytes", 0)
        if "peak_bytes" in answer:
            row["memory_bytes"] = max(row.get("memory_bytes", 0), answer["peak_bytes"])
            self.peak = max(self.peak, answer["peak_bytes"])
        row.pop("held_bytes", None), row.pop("peak_bytes", None)


def begin(run: Run, memory_limit: int | None) -> None:
    """Describe the machine, and count the model of --hf."""
    run.part["machine"] = {"memory_limit": memory_limit}
    machine = run.ask_once("machine")
    run.part["machine"] = {**machine, "memory_limit": memory_limit or machine["free_memory"]}
    if "hf" in run.part:
        hf.count(run)
