"""Candidates in turn, A B C A B C, each in its own process.

    a group: start, warm up, then a first round each (with a time limit two)
    all:     the rounds that are left, in turn, so that a drifting clock affects all alike

A group is one candidate, on CUDA three: one compiles on the CPU's cores while another warms up, and
nothing else runs while a round is timed. If the sleeping processes do not fit into memory together,
every round gets a new one ("fresh"); compiled candidates take all their rounds at once instead,
because they compile only once. What fails is a row with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from attention import Spec
from bench import Json, machine, tables
from bench.job import Bench, Plan
from bench.results import Progress, Result, content_of
from bench.workers import Failure, Stop, Worker, once

SHOWN = 2  # rounds from which a row is shown
TOGETHER = 3  # candidates that warm up at the same time on CUDA


class Turns:
    """The results and processes of a run."""

    def __init__(
        self, bench: Bench[Any], stop: Stop, progress: Progress, save: Callable[[Json], object]
    ) -> None:
        self.bench, self.stop, self.progress, self.save = bench, stop, progress, save
        self.began, self.reference = time.perf_counter(), bench.reference
        self.results: dict[str, Result] = {}
        self.workers: dict[str, Worker] = {}
        self.warm: dict[str, set[str]] = {}  # candidate -> results that its process has warmed up
        self.refused: dict[str, Failure] = {}  # candidates that cannot be built
        self.peak = 0  # the most bytes that any process needed
        self.crowded = False  # the sleeping processes do not fit into memory together
        self.fresh = False  # so every round had a new one
        self.setup_s, self.warm_up_s, self.round_s = 0.0, 0.0, 0.0  # the longest ones
        self.told: set[str] = set()
        self.target = 0  # rounds of a row

    def run(self, plan: Plan) -> None:
        """Measure a plan; rows that are there already get further rounds."""
        made = [Result(name, point) for point in plan.points for name in plan.jobs]
        results = [self.results.setdefault(str(r), r) for r in made]
        self.refuse(plan, results)
        done = max((len(r.rounds) for r in results), default=0)
        self.target = done + plan.rounds
        first = min(plan.rounds, SHOWN if self.stop.deadline else 1)
        try:
            if plan.reference and "why" in plan.reference:
                self.reference = plan.reference
            elif plan.reference and not self.bench.cuda:
                self.refer(plan.reference)
            for group in self.groups(plan, results):
                self.prepare(plan, group)
                self.turns(plan, group, done + first)
            self.turns(plan, results, self.target)
        finally:
            self.drop(*self.workers)

    def refuse(self, plan: Plan, results: list[Result]) -> None:
        """End the results of backends that support none of the plan's Specs."""
        bench, here = self.bench, self.bench.machine
        specs = [Spec(**{"dtype": here["dtype"], **spec}) for spec in plan.specs]
        policy = replace(bench.config.policy, fallback=False)
        refused = machine.refused([*bench.backends], specs, here, policy)
        refused |= {name: [why] for name, why in bench.left_out.items()}
        for r in results:
            if r.name in refused:
                r.fail(Failure("unavailable", refused[r.name][0]))

    def groups(self, plan: Plan, results: list[Result]) -> Iterator[list[Result]]:
        """Yield the results that are warmed up at the same time, of different candidates."""
        group: list[Result] = []
        for r in (r for r in results if not r.ended):
            alone = not self.bench.cuda or self.crowded or plan.request.get("auto")
            if len(group) == TOGETHER or (group and (alone or r.name in (g.name for g in group))):
                yield group
                group = []
            group.append(r)
        if group:
            yield group

    def turns(self, plan: Plan, results: Sequence[Result], rounds: int) -> None:
        """Let each take its turn until it has `rounds` rounds."""
        for n in range(1, rounds + 1):
            waiting = [r for r in results if not r.ended and len(r.rounds) < n]
            for r in waiting:
                self.progress.watch(f"round {n}: {r}")
                if not self.is_warm(r):
                    self.prepare(plan, [r])
                self.round(plan, r)
                self.make_room(plan)
            if waiting and not self.stop.why:
                self.save(self.content("the run had not ended"))

    def is_warm(self, r: Result) -> bool:
        return not r.ended and str(r) in self.warm.get(r.name, ())

    def round(self, plan: Plan, r: Result) -> None:
        """Measure the next round of a candidate that is warm."""
        if not self.is_warm(r):
            return
        worker, began = self.workers[r.name], time.perf_counter()
        try:
            if r.rounds:  # else its warm-up would be lost: ask() allows some seconds more
                self.stop.check()
            if plan.profile and "profile" not in r.about:
                r.about |= worker.ask({"profile": plan.profile})
            r.rounds.append(self.seen(r, worker.ask(self.request(plan, r))))
        except Failure as e:
            self.failed(plan, r, e)
            return
        self.round_s = max(self.round_s, time.perf_counter() - began)
        if len(r.rounds) == min(SHOWN, plan.rounds):
            ms = tables.medians({"rounds": r.rounds})["ms"]
            self.progress.tell(f"{r}: {ms:.4g} ms ({tables.count(len(r.rounds), 'round')})")

    def make_room(self, plan: Plan) -> None:
        """End the processes if they do not fit, compiled ones after all their rounds."""
        held = sum(w.held_bytes for w in self.workers.values()) + self.peak
        self.crowded |= 0 < 0.9 * self.bench.machine["memory_limit"] < held
        if not self.crowded or plan.fresh is False:
            return
        self.fresh |= not plan.compiled
        for r in self.results.values() if plan.compiled else ():
            while self.is_warm(r) and len(r.rounds) < self.target:
                self.round(plan, r)
        self.drop(*self.workers)

    # --- start and warm up ---

    def prepare(self, plan: Plan, group: list[Result]) -> None:
        """Start and warm up the candidates of a group at the same time."""
        self.progress.watch(f"warm-up: {', '.join(map(str, group))}")
        started, again = [], []
        for r in group:
            try:
                self.may_begin(plan, r)
                if plan.request.get("auto") and "batch_size" not in r.about:
                    r.about["batch_size"] = self.largest(plan, r)
                if r.name not in self.workers:
                    self.workers[r.name] = self.start(plan.work, plan.jobs[r.name])
                self.workers[r.name].send({**self.request(plan, r), "warm_up": True})
                started.append(r)
            except Failure as e:
                self.failed(plan, r, e)
        if plan.reference and not self.reference:
            self.refer(plan.reference)  # meanwhile
        for r in started:
            try:
                worker = self.workers[r.name]
                warm = self.seen(r, worker.receive())
                warm.pop("peak_bytes", None)
                self.setup_s = max(self.setup_s, worker.setup_s)
                self.warm_up_s = max(self.warm_up_s, worker.took_s)
                self.warm.setdefault(r.name, set()).add(str(r))
                if "setup_s" not in r.about:
                    took = {"setup_s": worker.setup_s, "warm_up_s": worker.took_s}
                    r.about |= {**worker.about, **warm, **took}
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
        if not r.rounds and r.name in self.refused:
            raise self.refused[r.name]
        rows = [other.row("") for other in self.results.values()]
        if not r.rounds and (why := plan.skip(r.name, r.point, rows)):
            raise Failure("skipped", why)
        need = self.warm_up_s + self.round_s * min(SHOWN, plan.rounds)
        need += self.setup_s if r.name not in self.workers else 0.0
        if not r.rounds and self.setup_s and self.stop.left < need:
            left = max(self.stop.left, 0)
            raise Failure("stopped", f"it takes about {need:.0f} s, and {left:.0f} s were left")
        self.stop.check()

    def start(self, work: str, job: Json) -> Worker:
        return Worker(work, job, self.bench.config.timeout, self.stop)

    def largest(self, plan: Plan, r: Result) -> int:
        """Return the batch size that fits, by a process that ends: its memory is in pieces."""
        worker = self.start(plan.work, plan.jobs[r.name])
        try:
            found: int = worker.ask({**self.request(plan, r), "largest": True})["batch_size"]
        finally:
            worker.close()
        return found

    def request(self, plan: Plan, r: Result) -> Json:
        return {**r.point, **plan.request, "batch_size": r.about.get("batch_size")}

    def refer(self, job: Json) -> None:
        """Compute the reference."""
        work, timeout = "bench.reference:Reference", self.bench.config.timeout
        try:
            self.reference = once(work, job, timeout, self.stop)
        except Failure as e:
            self.reference = {"why": str(e)}

    # --- what comes back ---

    def seen(self, r: Result, answer: Json) -> Json:
        """Note the memory of an answer, and return it."""
        peak = answer.get("peak_bytes", 0)
        r.memory, self.peak = max(r.memory, peak), max(self.peak, peak)
        return answer

    def failed(self, plan: Plan, r: Result, e: Failure) -> None:
        """Note why a result has no further rounds; with --batch_size=auto try a smaller one."""
        if e.kind == "died" or not e.built:
            self.drop(r.name)
        if not e.built:
            self.refused[r.name] = e
        n = r.about.get("batch_size", 1)
        if plan.request.get("auto") and n > 1 and not r.rounds and "out of memory" in str(e):
            r.about = {"batch_size": n * 3 // 4}  # several steps need more memory than one
            self.drop(r.name)
            self.prepare(plan, [r])
            return
        r.fail(e)
        if e.kind != "stopped" and str(e) not in self.told:
            self.told.add(str(e))
            self.progress.tell(f"{r}: {e.kind}: {e}")

    def drop(self, *names: str) -> None:
        for name in names:
            self.warm.pop(name, None)
            if worker := self.workers.pop(name, None):
                worker.close()

    def content(self, why: str = "") -> Json:
        """Return the content of the record so far; `why`: the reason if it is incomplete."""
        known: Json = {**self.bench.part, "reference": self.reference, "fresh_rounds": self.fresh}
        known["seconds"] = time.perf_counter() - self.began
        return known | content_of(self.bench, self.results.values(), self.stop.why or why)


def measure(bench: Bench[Any], plans: Sequence[Plan], stop: Stop, progress: Progress,
            save: Callable[[Json], object] = lambda content: None) -> Json:  # fmt: skip
    """Measure the plans of a mode. Return the content of the record, without its figures.

    `save` receives the content after every round.
    """
    turns = Turns(bench, stop, progress, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()
