"""Candidates in turn, A B C A B C, each in its own process.

    a group: start, warm up, then a first round each (with a time limit two)
    all:     the rounds that are left, in turn, so that a drifting clock affects all alike

A group is one candidate, on CUDA three: one compiles on the CPU's cores while another warms up, and
nothing else runs while a round is timed. If the sleeping processes do not fit into memory together,
every round gets a new one ("fresh"); candidates of one process (compiled ones) take all their
rounds at once instead. What fails is a row with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from attention import Spec
from bench import Json, machine, report, tables
from bench.job import Bench, Plan, Result
from bench.workers import Failure, Progress, Stop, Worker, once

SHOWN = 2  # rounds from which a row is shown
REFERENCE = "bench.hf:Reference"
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
        self.refused: dict[str, Failure] = {}  # candidates that cannot be built
        self.peak = 0  # the most bytes that any process needed
        self.crowded = False  # the sleeping processes do not fit into memory together
        self.fresh = False  # so every round had a new one
        self.took: dict[bool, float] = {}  # longest seconds of a group, by: in new processes?
        self.told: set[str] = set()

    def run(self, plan: Plan) -> None:
        """Measure a plan; rows that are there already get further rounds."""
        self.plan, bench = plan, self.bench
        made = [Result(name, point) for point in plan.points for name in plan.jobs]
        results = [self.results.setdefault(str(r), r) for r in made]
        specs = [Spec(**{"dtype": bench.machine["dtype"], **spec}) for spec in plan.specs]
        policy = replace(bench.config.policy, fallback=False)
        refused = machine.refused([*bench.backends], specs, bench.machine, policy)
        refused |= {name: [why] for name, why in bench.left_out.items()}
        for r in results:
            if r.name in refused:
                r.fail(Failure("unavailable", refused[r.name][0]))
        done = max((len(r.rounds) for r in results), default=0)
        self.target = done + plan.rounds
        first = done + min(plan.rounds, SHOWN if self.stop.deadline else 1)
        try:
            if not bench.cuda:
                self.refer()
            for group in self.groups(results):
                new, began = any(r.name not in self.workers for r in group), time.monotonic()
                self.prepare(group)
                self.turns(group, first)
                if any(r.rounds for r in group):
                    self.took[new] = max(self.took.get(new, 0.0), time.monotonic() - began)
            self.turns(results, self.target)
        finally:
            self.drop(*self.workers)

    def groups(self, results: list[Result]) -> Iterator[list[Result]]:
        """Yield the results that are warmed up at the same time, of different candidates."""
        group: list[Result] = []
        for r in (r for r in results if not r.ended):
            alone = not self.bench.cuda or self.crowded or self.bench.auto
            if len(group) == TOGETHER or (group and (alone or r.name in (g.name for g in group))):
                yield group
                group = []
            group.append(r)
        if group:
            yield group

    def turns(self, results: Sequence[Result], rounds: int) -> None:
        """Let each take its turn until it has `rounds` rounds."""
        for n in range(1, rounds + 1):
            waiting = [r for r in results if not r.ended and len(r.rounds) < n]
            for r in waiting:
                if not self.is_warm(r):
                    self.prepare([r])
                if self.is_warm(r):
                    self.round(r)
                self.make_room()
            if waiting and not self.stop.why:
                self.save(self.content("the run had not ended"))

    def is_warm(self, r: Result) -> bool:
        return not r.ended and r.name in self.workers and str(r) in self.workers[r.name].warm

    def round(self, r: Result) -> None:
        """Measure the next round of a candidate that is warm."""
        self.progress.watch(f"round {len(r.rounds) + 1}: {r}")
        try:
            if r.rounds:  # else its warm-up would be lost: receive() allows some seconds more
                self.stop.check()
            r.rounds.append(self.seen(r, self.workers[r.name].ask(self.request(r))))
        except Failure as e:
            return self.failed(r, e)
        if len(r.rounds) == min(SHOWN, self.plan.rounds):
            ms = tables.medians({"rounds": r.rounds})["ms"]
            self.progress.tell(f"{r}: {ms:.4g} ms ({tables.count(len(r.rounds), 'round')})")

    def make_room(self) -> None:
        """End the processes if they do not fit; those of one process after all their rounds."""
        held = sum(w.held_bytes for w in self.workers.values()) + self.peak
        self.crowded |= 0 < 0.9 * self.bench.machine["memory_limit"] < held
        if not self.crowded:
            return
        self.fresh |= not self.plan.one_process
        for r in self.results.values() if self.plan.one_process else ():
            while self.is_warm(r) and len(r.rounds) < self.target:
                self.round(r)
        self.drop(*self.workers)

    # --- start and warm up ---

    def prepare(self, group: list[Result]) -> None:
        """Start and warm up the candidates of a group at the same time."""
        started, again = [], []
        for r in group:
            try:
                self.may_begin(r)
                self.progress.watch(f"warm-up: {r}")
                self.start(r)
                started.append(r)
            except Failure as e:
                self.failed(r, e)
        self.refer()  # on CUDA meanwhile
        for r in started:
            worker = self.workers[r.name]
            try:
                warm = self.seen(r, worker.receive())
            except Failure as e:
                if len(started) > 1 and "out of memory" in str(e):  # of both together
                    self.drop(r.name)
                    again.append(r)
                else:
                    self.failed(r, e)
                continue
            worker.warm.add(str(r))
            if "setup_s" not in r.about:
                warm.pop("peak_bytes", None)
                took_s = {"setup_s": worker.setup_s, "warm_up_s": worker.took_s}
                r.about |= {**worker.about, **warm, **took_s}
        for r in again:
            self.prepare([r])

    def may_begin(self, r: Result) -> None:
        """Raises Failure for a result that is not worth a process, or has no time left."""
        self.stop.check(float("inf"))  # a signal
        if r.rounds:
            return self.stop.check()
        if r.name in self.refused:
            raise self.refused[r.name]
        rows = [other.row("") for other in self.results.values()]
        if why := self.plan.skip(r.name, r.point, rows):
            raise Failure("skipped", why)
        need = self.took.get(r.name not in self.workers, 0.0)
        if (left := self.stop.left) < max(need, 0.0):
            took = f"it takes about {need:.0f} s" if need else self.stop.spent
            raise Failure("stopped", f"{took}, and {max(left, 0):.0f} s were left")

    def start(self, r: Result) -> None:
        """Send the warm-up to the process of a result. With --batch_size=auto another, uncompiled
        one finds the batch size before: its memory is in pieces."""
        plan, job, timeout = self.plan, self.plan.jobs[r.name], self.bench.config.timeout
        if self.bench.auto and "batch_size" not in r.about:
            eager = {**job, "train": {**job["train"], "compile": False}}
            request = {**self.request(r), "largest": True}
            found = once(plan.work, eager, timeout, self.stop, request)
            r.about["batch_size"] = found["batch_size"]
        if r.name not in self.workers:
            self.workers[r.name] = Worker(plan.work, job, timeout, self.stop)
        self.workers[r.name].send({**self.request(r), "warm_up": True})

    def request(self, r: Result) -> Json:
        size = {"batch_size": r.about.get("batch_size")}
        return {**r.point, **size, "first": not r.rounds}

    def refer(self) -> None:
        """Compute the reference, if there is none yet."""
        job = self.plan.reference
        if job is None or self.reference:
            return
        try:
            timeout, stop = self.bench.config.timeout, self.stop
            self.reference = job if "why" in job else once(REFERENCE, job, timeout, stop)
        except Failure as e:
            self.reference = {"why": str(e)}

    # --- what comes back ---

    def seen(self, r: Result, answer: Json) -> Json:
        """Note what an answer has about the row; return the rest."""
        r.about |= answer.pop("about", {})
        peak = answer.get("peak_bytes", 0)
        r.memory, self.peak = max(r.memory, peak), max(self.peak, peak)
        return answer

    def failed(self, r: Result, e: Failure) -> None:
        """Note why a result has no further rounds; with --batch_size=auto try a smaller one."""
        if e.kind == "died" or not e.built:
            self.drop(r.name)
        if not e.built:
            self.refused[r.name] = e
        n = r.about.get("batch_size", 1)
        if self.bench.auto and n > 1 and not r.rounds and "out of memory" in str(e):
            r.about = {"batch_size": n * 3 // 4}  # several steps need more memory than one
            self.drop(r.name)
            return self.prepare([r])
        r.fail(e)
        if e.kind != "stopped" and str(e) not in self.told:
            self.told.add(str(e))
            self.progress.tell(f"{r}: {e.kind}: {e}")

    def drop(self, *names: str) -> None:
        for name in names:
            if worker := self.workers.pop(name, None):
                worker.close()

    def content(self, why: str = "") -> Json:
        """Return the content of the record so far; `why`: the reason if it is incomplete."""
        bench, rows = self.bench, [r.row(self.bench.mode) for r in self.results.values()]
        known: Json = {**bench.part, "reference": self.reference, "fresh_rounds": self.fresh}
        known |= {"seconds": time.perf_counter() - self.began, "rows": rows}
        none = sum(row["status"] == "stopped" for row in rows)
        why = self.stop.why or why or ("the time limit was reached" if none else "")
        if not why:
            return known | {"complete": True}
        planned = report.planned(bench.mode, bench.config.flat())
        few = sum(row["status"] == "ok" and len(row["rounds"]) < planned for row in rows)
        missing = [f"{none} of {len(rows)} rows were not measured"] if none else []
        missing += [f"{few} have fewer than {planned} rounds"] if few else []
        return known | {"complete": False, "incomplete": "; ".join([why, *missing])}


def measure(bench: Bench[Any], plans: Sequence[Plan], stop: Stop, progress: Progress,
            save: Callable[[Json], object] = lambda content: None) -> Json:  # fmt: skip
    """Measure the plans of a mode. Return the content of the record, without its figures.

    `save` receives the content after every round.
    """
    turns = Turns(bench, stop, progress, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()
