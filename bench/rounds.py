"""Candidates in turn, A B C A B C, each in its own process.

    a group: start, warm up, then a first round each (with a time limit two)
    all:     the rounds that are left, in turn, so that a drifting clock affects all alike

A group is one candidate, on CUDA two: one compiles on the CPU's cores while the other warms up, and
nothing else runs while a round is timed. If the sleeping processes do not fit into memory together,
every round gets a new one ("fresh"); compiled candidates take all their rounds at once instead,
because they compile only once. What fails is a row with its reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from attention import Spec
from bench import Json, machine, record, tables
from bench.job import Bench, Plan
from bench.settings import Settings
from bench.tables import Row
from bench.workers import Failure, Stop, Worker
from core.settings import UserError

SHOWN = 2  # rounds from which a row is shown


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
class Result:
    """A row: one candidate at one point."""

    name: str
    point: Json
    rounds: list[Json] = field(default_factory=list)
    about: Json = field(default_factory=dict)  # from the set-up and the warm-up
    failure: Failure = field(
        default_factory=lambda: Failure("stopped", ["no round was measured yet"])
    )
    ended: bool = False  # no further rounds
    batch_size: int | None = None  # that --batch_size=auto found
    memory: int = 0
    before: int = 0  # rounds of earlier plans

    @property
    def key(self) -> tuple[str, str]:
        return self.name, str(self.point)

    @property
    def done(self) -> int:
        """Rounds of this plan."""
        return len(self.rounds) - self.before

    def fail(self, failure: Failure) -> None:
        """End it; if the bench was stopped, its rounds so far count."""
        self.ended = True
        if failure.kind != "stopped" or not self.rounds:
            self.failure, self.rounds = failure, []

    def row(self, mode: str) -> Row:
        status = "ok" if self.rounds else self.failure.kind.replace("died", "failed")
        row: Row = {"mode": mode, "backend": self.name, "point": self.point, "status": status}
        row |= {"rounds": [dict(r) for r in self.rounds], **self.about}
        row |= {"batch_size": self.batch_size} if self.batch_size else {}
        row |= {"memory_bytes": self.memory} if self.memory else {}
        return row if self.rounds else {**row, "why": list(self.failure.why)}


class Turns:
    """The results and processes of a run."""

    def __init__(
        self, bench: Bench[Any], stop: Stop, progress: Progress, save: Callable[[Json], object]
    ) -> None:
        self.bench, self.stop, self.progress, self.save = bench, stop, progress, save
        self.began = time.perf_counter()
        self.results: dict[tuple[str, str], Result] = {}
        self.reference = bench.reference
        self.crowded = False  # the sleeping processes do not fit into memory together
        self.fresh = False  # so every round had a new one
        self.workers: dict[str, Worker] = {}
        self.pending: Worker | None = None  # that computes the reference
        self.warm: set[tuple[str, str]] = set()  # results that their worker has warmed up
        self.refused: dict[str, Failure] = {}  # candidates that cannot be built
        self.held: dict[str, int] = {}  # bytes of a sleeping worker
        self.peak = 0  # the most bytes that any worker needed
        self.costs = {
            True: 0.0,
            False: 0.0,
        }  # longest warm-up in seconds, with a new process or not
        self.turn_s = 0.0  # the longest round
        self.told: set[str] = set()

    def run(self, plan: Plan) -> None:
        """Measure a plan; rows that are there already get further rounds."""
        made = [Result(name, point) for point in plan.points for name in plan.jobs]
        results = [self.results.setdefault(r.key, r) for r in made]
        for r in results:
            r.before = len(r.rounds)
        self.refuse(plan, results)
        first = min(plan.rounds, SHOWN if self.stop.deadline else 1)
        try:
            self.start_reference(plan)
            for group in self.groups(plan, results):
                self.prepare(plan, group)
                self.turns(plan, group, first)
            self.turns(plan, results, plan.rounds)
        finally:
            self.drop(*self.workers)
            if self.pending:
                self.pending.close()

    def refuse(self, plan: Plan, results: list[Result]) -> None:
        """End the results of backends that support none of the plan's Specs."""
        bench, here = self.bench, self.bench.machine
        specs = [Spec(**{"dtype": here["dtype"], **spec}) for spec in plan.specs]
        policy = replace(bench.config.policy, fallback=False)
        refused = machine.refused([*bench.backends], specs, here, policy)
        refused |= {name: [why] for name, why in bench.left_out.items()}
        for r in results:
            if r.name in refused:
                r.fail(Failure("unavailable", refused[r.name]))

    def groups(self, plan: Plan, results: list[Result]) -> Iterator[list[Result]]:
        """Yield the results that are warmed up at the same time, of different candidates."""
        group: list[Result] = []
        for r in (r for r in results if not r.ended):
            many = self.bench.cuda and not (self.crowded or plan.request.get("auto"))
            if group and (len(group) > 1 or not many or r.name == group[0].name):
                yield group
                group = []
            group.append(r)
        if group:
            yield group

    def turns(self, plan: Plan, results: Sequence[Result], rounds: int) -> None:
        """Let each take its turn until it has `rounds` rounds."""
        for n in range(1, rounds + 1):
            for r in results:
                if not r.ended and r.done < n:
                    self.progress.watch(f"round {n} of {plan.rounds}: {self.where(r)}")
                    self.turn(plan, r)
            if not self.stop.why:
                self.save(self.content("the run had not ended"))

    def turn(self, plan: Plan, r: Result) -> None:
        """Let a candidate measure its next round, if it can be warmed up."""
        if r.key not in self.warm:
            self.prepare(plan, [r])
        self.round(plan, r)
        limit = 0.9 * self.bench.machine["memory_limit"]
        if limit and sum(self.held.values()) + self.peak > limit:
            self.crowded = plan.fresh is None
        if self.crowded:
            self.make_room(plan)

    def round(self, plan: Plan, r: Result) -> None:
        if r.ended or r.key not in self.warm:
            return
        worker, began = self.workers[r.name], time.perf_counter()
        try:
            self.stop.check()
            if plan.profile and "profile" not in r.about:
                r.about |= self.seen(r, worker, worker.ask({"profile": plan.profile}))
            r.rounds.append(self.seen(r, worker, worker.ask(self.request(plan, r))))
        except Failure as e:
            self.failed(plan, r, e)
            return
        self.turn_s = max(self.turn_s, time.perf_counter() - began)
        if r.done == min(SHOWN, plan.rounds):
            ms = tables.medians({"rounds": r.rounds})["ms"]
            rounds = tables.count(len(r.rounds), "round")
            self.progress.tell(f"{self.where(r)}: {ms:.4g} ms ({rounds})")

    def make_room(self, plan: Plan) -> None:
        """End the processes, compiled ones after all their rounds."""
        self.fresh |= not plan.compiled
        for r in [*self.results.values()] if plan.compiled else ():
            while r.key in self.warm and not r.ended and r.done < plan.rounds:
                self.round(plan, r)
        self.drop(*self.workers)

    # --- start and warm up ---

    def prepare(self, plan: Plan, group: list[Result]) -> None:
        """Start and warm up the candidates of a group, all at the same time."""
        self.progress.watch(f"warm-up: {', '.join(map(self.where, group))}")
        started, again = [], []
        for r in group:
            try:
                self.may_begin(plan, r)
                new = r.name not in self.workers
                worker = self.worker(plan, r.name)
                if plan.request.get("auto") and r.batch_size is None:
                    r.batch_size = self.largest(plan, r)
                worker.send({**self.request(plan, r), "warm_up": True})
                started.append((r, new))
            except Failure as e:
                self.failed(plan, r, e)
        self.take_reference()
        for r, new in started:
            try:
                worker = self.workers[r.name]
                about = self.begun(r.name, worker)
                warm = self.seen(r, worker, worker.receive())
                warm.pop("peak_bytes", None)
                self.costs[new] = max(self.costs[new], worker.took_s + new * worker.setup_s)
                self.warm.add(r.key)
                if not r.about:
                    r.about = {**about, **warm, "setup_s": worker.setup_s}
                    r.about["warm_up_s"] = worker.took_s
            except Failure as e:
                if len(started) > 1 and "out of memory" in str(e):  # of both together
                    self.drop(r.name)
                    again.append(r)
                else:
                    self.failed(plan, r, e)
        for r in again:
            self.prepare(plan, [r])

    def may_begin(self, plan: Plan, r: Result) -> None:
        """Raises Failure for a result that is not worth a process, or has no time left."""
        if r.rounds:
            self.stop.check()
            return
        if r.name in self.refused:
            raise self.refused[r.name]
        if why := plan.skip(r.name, r.point, [other.row("") for other in self.results.values()]):
            raise Failure("skipped", [why])
        new = r.name not in self.workers
        need = (self.costs[new] or self.costs[not new]) + self.turn_s * min(SHOWN, plan.rounds)
        left = self.stop.left
        if self.turn_s and left < need and not (self.stop.signals and self.stop.signals.signal):
            took = f"it takes about {need:.0f} s, and {max(left, 0):.0f} s were left"
            raise Failure("stopped", [f"the time limit: {took}"])
        self.stop.check()

    def worker(self, plan: Plan, name: str) -> Worker:
        if name not in self.workers:
            job, timeout = plan.jobs[name], self.bench.config.timeout
            self.workers[name] = Worker(plan.work, job, timeout, self.stop)
        return self.workers[name]

    def begun(self, name: str, worker: Worker) -> Json:
        try:
            return worker.begun()
        except Failure as e:
            self.drop(name)
            if e.kind != "stopped":
                self.refused[name] = e
            raise

    def largest(self, plan: Plan, r: Result) -> int:
        """Return the batch size that fits; its process ends, whose memory is in pieces."""
        worker = self.workers[r.name]
        self.begun(r.name, worker)
        try:
            found: int = worker.ask({**self.request(plan, r), "largest": True})["batch_size"]
        finally:
            self.drop(r.name)
        self.worker(plan, r.name)
        return found

    def request(self, plan: Plan, r: Result) -> Json:
        return {**r.point, **plan.request, "batch_size": r.batch_size}

    def start_reference(self, plan: Plan) -> None:
        if plan.reference and "why" in plan.reference:
            self.reference = plan.reference
        elif plan.reference:
            with suppress(Failure):  # the bench was stopped
                timeout = self.bench.config.timeout
                self.pending = Worker("bench.train:Reference", plan.reference, timeout, self.stop)
            if not self.bench.cuda:
                self.progress.watch("the reference")
                self.take_reference()

    def take_reference(self) -> None:
        if self.pending:
            try:
                self.reference = self.pending.begun()
            except Failure as e:
                self.reference = {"why": str(e)}
            self.pending.close()
            self.pending = None

    # --- what comes back ---

    def seen(self, r: Result, worker: Worker, answer: Json) -> Json:
        """Note the memory of an answer, and return it."""
        self.held[r.name], peak = worker.held_bytes, answer.get("peak_bytes", 0)
        r.memory, self.peak = max(r.memory, peak), max(self.peak, peak)
        return answer

    def failed(self, plan: Plan, r: Result, e: Failure) -> None:
        """Note why a result has no further rounds; with --batch_size=auto try a smaller one."""
        if r.batch_size and r.batch_size > 1 and not r.rounds and "out of memory" in str(e):
            r.batch_size = r.batch_size * 3 // 4  # several steps need more than one
            self.drop(r.name)
            self.turn(plan, r)
            return
        r.fail(e)
        if e.kind == "died":
            self.drop(r.name)
        if e.kind != "stopped" and str(e) not in self.told:
            self.told.add(str(e))
            self.progress.tell(f"{self.where(r)}: {e.kind}: {e}")

    def drop(self, *names: str) -> None:
        for name in [*names]:
            if name in self.workers:
                self.workers.pop(name).close()
            self.held.pop(name, None)
            self.warm = {key for key in self.warm if key[0] != name}

    def where(self, r: Result) -> str:
        return tables.where(r.point, r.name)

    def content(self, why: str = "") -> Json:
        """Return the content of the record so far; `why`: the reason if it is incomplete."""
        rows = [r.row(self.bench.mode) for r in self.results.values()]
        none = sum(r["status"] == "stopped" for r in rows)
        why = self.stop.why or why or ("the time limit was reached" if none else "")
        content: Json = {**self.bench.part, "reference": self.reference, "rows": rows}
        content |= {"fresh_rounds": self.fresh, "seconds": time.perf_counter() - self.began}
        content["complete"] = not why
        if why:
            planned = record.planned(self.bench.mode, content["settings"])
            few = sum(r["status"] == "ok" and len(r["rounds"]) < planned for r in rows)
            missing = [f"{none} of {len(rows)} rows were not measured"] if none else []
            missing += [f"{few} have fewer than {planned} rounds"] if few else []
            content["incomplete"] = "; ".join([why, *missing])
        return content


def measure(
    bench: Bench[Any],
    plans: Sequence[Plan],
    stop: Stop,
    progress: Progress,
    save: Callable[[Json], object] = lambda content: None,
) -> Json:
    """Measure the plans of a mode. Return the content of the record, without its figures.

    `save` receives the content after every round.
    """
    turns = Turns(bench, stop, progress, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()


def once(work: str, job: Json, config: Settings, stop: Stop) -> Json:
    """Return the answer of a worker to its job alone."""
    worker = Worker(work, job, config.timeout, stop)
    about = worker.begun()
    worker.close()
    return about


def describe(bench: Bench[Any], stop: Stop, progress: Progress) -> Bench[Any]:
    """Return the same with the machine described, and the model of --hf counted."""
    config: Any = bench.config
    progress.watch("the machine")
    job = bench.job() | {"bandwidth_gbs": getattr(config, "bandwidth_gbs", None)}
    wants = bench.mode in ("decode", "qualify") or getattr(config, "profile", False)
    about = once("bench.machine:Description", job | {"wants_bandwidth": wants}, config, stop)
    limit = bench.machine.get("memory_limit") or about["free_memory"]
    bench = replace(bench, machine={**about, "memory_limit": limit})
    if not bench.hf:
        return bench
    batch = 1 if config.batch_size == "auto" or bench.mode != "train" else config.batch_size
    batch *= config.gradient_accumulation_steps if bench.mode == "train" else 1
    try:
        reference = once("bench.train:Reference", bench.job(batch_size=batch), config, stop)
    except Failure as e:
        if e.kind == "stopped":
            raise
        raise UserError(f"--hf={config.hf}: {e}") from None
    counted = reference.pop("counted")
    return replace(bench, hf={**bench.hf, "counted": counted}, reference=reference)
