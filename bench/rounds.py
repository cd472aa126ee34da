"""Candidates in turn, A B C A B C, each in its own process. Groups (of one, on CUDA three) start
and have a first round; then all have the others: a drifting clock affects all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from bench import Json, report, tables
from bench.hf import Reference
from bench.job import Bench, Plan
from bench.tables import Row
from bench.workers import Failure, Stop, Worker, once

SHOWN = 2  # rounds of a shown row
TOGETHER = 3
Save = Callable[[Json], object]


def key(row: Row) -> str:
    return tables.where(row["point"], row["backend"])


class Turns:
    """`save` receives the record after every round."""

    def __init__(self, bench: Bench, stop: Stop, save: Save | None) -> None:
        self.bench, self.stop, self.save = bench, stop, save
        self.began, self.reference = time.perf_counter(), bench.reference
        self.rows: dict[str, Row] = {}
        self.ended: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.peak = 0  # bytes of the largest process
        self.crowded = False  # sleeping processes do not fit into memory
        self.fresh = False  # every round had a new process
        self.took: dict[bool, float] = {}  # longest seconds of a group, by: new?
        self.again: list[Row] | None = None  # for each other's memory; None: alone

    def run(self, plan: Plan) -> None:
        self.plan = plan
        none: Json = {"mode": self.bench.mode, "status": "stopped"}
        none |= {"why": ["no round was measured"], "rounds": []}
        made = [{**none, "backend": name, "point": p} for p in plan.points for name in plan.jobs]
        rows = [self.rows.setdefault(key(row), row) for row in made]
        done = max((len(row["rounds"]) for row in rows), default=0)
        self.target = done + plan.rounds
        first = done + min(plan.rounds, SHOWN if self.stop.left < math.inf else 1)
        try:
            while waiting := self.waiting(rows, first):
                alone = not self.bench.cuda or self.bench.auto or self.crowded
                few = waiting[: 1 if alone else TOGETHER]
                group = [*{row["backend"]: row for row in few[::-1]}.values()][::-1]
                began, new = time.monotonic(), group[0]["backend"] not in self.workers
                self.prepare(group)
                self.turns(group, first)
                if any(row["rounds"] for row in group):
                    self.took[new] = max(self.took.get(new, 0.0), time.monotonic() - began)
                self.refer()
            self.turns(rows, self.target)
        finally:
            self.drop(*self.workers)

    def waiting(self, rows: Sequence[Row], rounds: int) -> list[Row]:
        return [r for r in rows if key(r) not in self.ended and len(r["rounds"]) < rounds]

    def turns(self, rows: Sequence[Row], rounds: int) -> None:
        for n in range(1, rounds + 1):
            for row in (waiting := self.waiting(rows, n)):
                if not self.is_warm(row):
                    self.prepare([row])
                if self.is_warm(row):
                    self.attempt(self.round, row)
                self.make_room()
            if self.save and waiting and not self.stop.why:
                self.save(self.content("the run had not ended"))

    def is_warm(self, row: Row) -> bool:
        worker, name = self.workers.get(row["backend"]), key(row)
        return worker is not None and name in worker.warm and name not in self.ended

    def round(self, row: Row) -> None:
        self.stop.watch(f"round {len(row['rounds']) + 1}: {key(row)}")
        # A warm-up is not lost: receive() allows some seconds more.
        self.stop.check(0.0 if row["rounds"] else math.inf)
        answer = self.seen(row, self.workers[row["backend"]].ask("round", self.request(row)))
        row |= {"status": "ok", "rounds": [*row["rounds"], answer]}
        row.pop("why", None)
        if len(row["rounds"]) == min(SHOWN, self.plan.rounds):
            found, n = tables.medians(row), tables.count(len(row["rounds"]), "round")
            noisy = f", {found['spread']:.0%} apart: noisy" if found["noisy"] else ""
            self.stop.tell(f"{key(row)}: {found['ms']:.4g} ms ({n}{noisy})")

    def make_room(self) -> None:
        """End processes that do not fit; with one_process after all rounds."""
        held = sum(worker.held_bytes for worker in self.workers.values()) + self.peak
        self.crowded |= 0 < 0.9 * self.bench.machine["memory_limit"] < held
        if not self.crowded:
            return
        self.fresh |= not self.plan.one_process
        for row in self.rows.values() if self.plan.one_process else ():
            while self.is_warm(row) and len(row["rounds"]) < self.target:
                self.attempt(self.round, row)
        self.drop(*self.workers)

    def prepare(self, group: list[Row]) -> None:
        """Start and warm up; rows that ran out of memory together again, one by one."""
        started = [r for r in group if key(r) not in self.ended and self.attempt(self.start, r)]
        if self.bench.cuda:
            self.refer()
        self.again = [] if len(started) > 1 else None
        for row in started:
            self.attempt(self.finish, row)
        again, self.again = self.again, None
        for row in again or ():
            self.prepare([row])

    def attempt(self, do: Callable[[Row], None], row: Row) -> bool:
        try:
            do(row)
        except Failure as e:
            self.failed(row, e)
            return False
        return True

    def finish(self, row: Row) -> None:
        worker = self.workers[row["backend"]]
        warm = self.seen(row, worker.receive())
        worker.warm.add(key(row))
        if "setup_s" not in row:
            row |= {name: value for name, value in warm.items() if name != "peak_bytes"}

    def start(self, row: Row) -> None:
        """Send the warm-up. Failure: not worth a process, or time is up."""
        name, plan, stop, job = row["backend"], self.plan, self.stop, self.plan.jobs[row["backend"]]
        stop.check(0.0 if row["rounds"] else math.inf)  # inf: for signals only
        if not row["rounds"]:
            self.bench.admit(name, plan.spec(row["point"]))
            T = row["point"].get("T", job.config.block_size)
            if (most := plan.longest.get(name, T)) < T:
                beyond = f" beyond {most:,} tokens" if most else ""
                also = ", and --lengths" if self.bench.mode == "kernel" else ""
                raise Failure("skipped", f"left out{beyond}: name it in --backends{also}")
            if why := plan.skip(row, [*self.rows.values()]):
                raise Failure("skipped", why)
            need = self.took.get(name not in self.workers, 0.0)
            if stop.left < need:
                took = f"it takes about {need:.0f} s" if need else stop.spent
                raise Failure("stopped", f"{took}, and {max(stop.left, 0):.0f} s were left")
        stop.watch(f"warm-up: {key(row)}")
        if self.bench.auto and "batch_size" not in row:  # by another process: memory fragments
            row |= once(plan.work, job.but(compile=False), stop, "largest", self.request(row))
        if name not in self.workers:
            self.workers[name] = Worker(plan.work, job, stop)
        self.workers[name].send("warm_up", self.request(row))

    def request(self, row: Row) -> Json:
        return {**row["point"], "batch_size": row.get("batch_size"), "first": not row["rounds"]}

    def refer(self) -> None:
        job = self.plan.reference
        if job and not self.reference:
            try:
                of = {"why": job} if isinstance(job, str) else once(Reference, job, self.stop)
                self.reference = of
            except Failure as e:
                self.reference = {"why": str(e)}

    def seen(self, row: Row, answer: Json) -> Json:
        row |= answer.pop("about", {})
        if peak := answer.get("peak_bytes", 0):
            row["memory_bytes"] = max(row.get("memory_bytes", 0), peak)
            self.peak = max(self.peak, peak)
        return answer

    def failed(self, row: Row, e: Failure) -> None:
        """End a row, or try again: alone, or with --batch_size=auto a smaller batch."""
        if e.kind == "died" or not e.built:
            self.drop(row["backend"])
        if "out of memory" in str(e) and self.again is not None:
            self.drop(row["backend"])
            return self.again.append(row)
        n = row.get("batch_size", 1) if self.bench.auto and not row["rounds"] else 1
        if n > 1 and "out of memory" in str(e):  # several steps need more than one
            self.drop(row["backend"])
            row.pop("setup_s", None)
            row["batch_size"] = n * 3 // 4
            return self.prepare([row])
        name, rows = row["backend"], self.rows.values()
        same = [r for r in rows if r["backend"] == name and not (e.built or r["rounds"])]
        for its in (row, *same):
            self.ended.add(key(its))
            if e.kind != "stopped" or not its["rounds"]:  # else its rounds so far count
                its |= {"status": e.kind.replace("died", "failed"), "why": [str(e)], "rounds": []}
        if e.kind not in ("stopped", "unavailable"):
            self.stop.tell(f"{key(row)}: {e.kind}: {e}")

    def drop(self, *names: str) -> None:
        for worker in (self.workers.pop(name) for name in names if name in self.workers):
            worker.close()

    def content(self, why: str = "") -> Json:
        bench, rows = self.bench, [dict(row) for row in self.rows.values()]
        known: Json = {**bench.part, "reference": self.reference, "fresh_rounds": self.fresh}
        known |= {"seconds": time.perf_counter() - self.began, "rows": rows}
        why = report.incomplete(rows, bench.part, self.stop.why or why)
        return known | ({"complete": False, "incomplete": why} if why else {"complete": True})


def measure(bench: Bench, plans: Sequence[Plan], stop: Stop, save: Save | None = None) -> Json:
    turns = Turns(bench, stop, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()
