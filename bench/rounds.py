"""Candidates in turn, A B C A B C, each in its own process. Groups (of one, on CUDA three) start
and have a first round; then all have the others: a drifting clock affects all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import Json, report, tables
from bench.job import Bench, Plan
from bench.tables import Row
from bench.workers import Failure, Stop, Worker, once

SHOWN = 2  # rounds of a shown row
TOGETHER = 3


def key(row: Row) -> str:
    return tables.where(row["point"], row["backend"])


class Turns:
    """`save` receives the record after every round."""

    def __init__(self, bench: Bench[Any], stop: Stop, save: Callable[[Json], object]) -> None:
        self.bench, self.stop, self.save = bench, stop, save
        self.began, self.reference = time.perf_counter(), bench.reference
        self.rows: dict[str, Row] = {}
        self.ended: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.refused: dict[str, Failure] = {}
        self.peak = 0  # bytes of the largest process
        self.crowded = False  # sleeping processes do not fit into memory
        self.fresh = False  # every round had a new process
        self.took: dict[bool, float] = {}  # longest seconds of a group, by: new?

    def run(self, plan: Plan) -> None:
        self.plan, bench = plan, self.bench
        refused = bench.refused(plan.specs)
        none: Json = {"mode": bench.mode, "status": "stopped", "why": ["no round was measured"]}
        made = [none | {"backend": name, "point": point, "rounds": []}
                for point in plan.points for name in plan.jobs]  # fmt: skip
        rows = [self.rows.setdefault(key(row), row) for row in made]
        for row in rows:
            if why := refused.get(row["backend"]):
                self.failed(row, Failure("unavailable", why))
        done = max((len(row["rounds"]) for row in rows), default=0)
        self.target = done + plan.rounds
        first = done + min(plan.rounds, SHOWN if self.stop.left < math.inf else 1)
        try:
            for group in self.groups(rows):
                began, new = time.monotonic(), group[0]["backend"] not in self.workers
                self.prepare(group)
                self.turns(group, first)
                if any(row["rounds"] for row in group):
                    self.took[new] = max(self.took.get(new, 0.0), time.monotonic() - began)
                self.refer()
            self.turns(rows, self.target)
        finally:
            self.drop(*self.workers)

    def groups(self, rows: list[Row]) -> Iterator[list[Row]]:
        group: list[Row] = []
        for row in (row for row in rows if key(row) not in self.ended):
            alone = not self.bench.cuda or self.crowded or self.bench.auto
            same = row["backend"] in (other["backend"] for other in group)
            if group and (alone or same or len(group) == TOGETHER):
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def turns(self, rows: Sequence[Row], rounds: int) -> None:
        for n in range(1, rounds + 1):
            waiting = [r for r in rows if key(r) not in self.ended and len(r["rounds"]) < n]
            for row in waiting:
                if not self.is_warm(row):
                    self.prepare([row])
                self.round(row)
                self.make_room()
            if waiting and not self.stop.why:
                self.save(self.content("the run had not ended"))

    def is_warm(self, row: Row) -> bool:
        worker, name = self.workers.get(row["backend"]), key(row)
        return worker is not None and name in worker.warm and name not in self.ended

    def round(self, row: Row) -> None:
        if not self.is_warm(row):
            return
        self.stop.watch(f"round {len(row['rounds']) + 1}: {key(row)}")
        try:
            # A warm-up is not lost: receive() allows some seconds more.
            self.stop.check(0.0 if row["rounds"] else math.inf)
            answer = self.seen(row, self.workers[row["backend"]].ask(self.request(row)))
        except Failure as e:
            return self.failed(row, e)
        row |= {"status": "ok", "rounds": [*row["rounds"], answer]}
        row.pop("why", None)
        if len(row["rounds"]) == min(SHOWN, self.plan.rounds):
            found, n = tables.medians(row), tables.count(len(row["rounds"]), "round")
            noisy = f", {found['spread']:.0%} apart: noisy" if found["noisy"] else ""
            self.stop.tell(f"{key(row)}: {found['ms']:.4g} ms ({n}{noisy})")

    def make_room(self) -> None:
        """End processes that do not fit; with one_process after all rounds."""
        held = sum(w.last["held_bytes"] for w in self.workers.values()) + self.peak
        self.crowded |= 0 < 0.9 * self.bench.machine["memory_limit"] < held
        if not self.crowded:
            return
        self.fresh |= not self.plan.one_process
        for row in self.rows.values() if self.plan.one_process else ():
            while self.is_warm(row) and len(row["rounds"]) < self.target:
                self.round(row)
        self.drop(*self.workers)

    def prepare(self, group: list[Row]) -> None:
        started, again = [], []
        for row in group:
            try:
                self.start(row)
                started.append(row)
            except Failure as e:
                self.failed(row, e)
        if self.bench.cuda:
            self.refer()
        for row in started:
            worker = self.workers[row["backend"]]
            try:
                warm = self.seen(row, worker.receive())
            except Failure as e:
                if len(started) > 1 and "out of memory" in str(e):  # of both together
                    self.drop(row["backend"])
                    again.append(row)
                else:
                    self.failed(row, e)
                continue
            worker.warm.add(key(row))
            if "setup_s" not in row:
                warm.pop("peak_bytes", None)
                last, setup_s = worker.last, worker.last["built_at"] - worker.began
                row |= {**last["about"], **warm, "setup_s": setup_s, "warm_up_s": last["took_s"]}
        for row in again:
            self.prepare([row])

    def start(self, row: Row) -> None:
        """Send the warm-up; with --batch_size=auto find the size in another process, as memory
        fragments. Failure: not worth a process, or time is up."""
        name, plan, stop, timeout = row["backend"], self.plan, self.stop, self.bench.config.timeout
        stop.check(0.0 if row["rounds"] else math.inf)  # inf: for signals only
        if not row["rounds"]:
            if name in self.refused:
                raise self.refused[name]
            T = row["point"].get("T", self.bench.config.block_size)
            if (most := plan.longest.get(name, T)) < T:
                beyond = f" beyond {most:,} tokens" if most else ""
                also = ", and --lengths" if self.bench.mode == "kernel" else ""
                raise Failure("skipped", f"left out{beyond}: name it in --backends{also}")
            if why := plan.skip(row, [*self.rows.values()]):
                raise Failure("skipped", why)
            need = self.took.get(name not in self.workers, 0.0)
            if stop.left < need or stop.left < 0:
                took = f"it takes about {need:.0f} s" if need else stop.spent
                raise Failure("stopped", f"{took}, and {max(stop.left, 0):.0f} s were left")
        self.stop.watch(f"warm-up: {key(row)}")
        job = plan.jobs[name]
        if self.bench.auto and "batch_size" not in row:
            eager = {**job, "train": {**job["train"], "compile": False}}
            request = {**self.request(row), "largest": True}
            row["batch_size"] = once(plan.work, eager, timeout, stop, request)["batch_size"]
        if name not in self.workers:
            self.workers[name] = Worker(plan.work, job, timeout, stop)
        self.workers[name].send(self.request(row) | {"warm_up": True})

    def request(self, row: Row) -> Json:
        size = row.get("batch_size") if self.bench.auto else None
        return {**row["point"], "batch_size": size, "first": not row["rounds"]}

    def refer(self) -> None:
        job, how = self.plan.reference, (self.bench.config.timeout, self.stop)
        if job and not self.reference:
            try:
                self.reference = job if "why" in job else once("bench.hf:Reference", job, *how)
            except Failure as e:
                self.reference = {"why": str(e)}

    def seen(self, row: Row, answer: Json) -> Json:
        row |= answer.pop("about", {})
        if peak := answer.get("peak_bytes", 0):
            row["memory_bytes"] = max(row.get("memory_bytes", 0), peak)
            self.peak = max(self.peak, peak)
        return answer

    def failed(self, row: Row, e: Failure) -> None:
        """End a row, or with --batch_size=auto try a smaller batch."""
        if e.kind == "died" or not e.built:
            self.drop(row["backend"])
        if not e.built:
            self.refused[row["backend"]] = e
        n = row.get("batch_size", 1) if self.bench.auto and not row["rounds"] else 1
        if n > 1 and "out of memory" in str(e):  # several steps need more than one
            self.drop(row["backend"])
            row.pop("setup_s", None)
            row["batch_size"] = n * 3 // 4
            return self.prepare([row])
        self.ended.add(key(row))
        if e.kind != "stopped" or not row["rounds"]:  # else its rounds so far count
            row |= {"status": e.kind.replace("died", "failed"), "why": [e.why], "rounds": []}
        if e.kind not in ("stopped", "unavailable"):
            self.stop.tell(f"{key(row)}: {e.kind}: {e}")

    def drop(self, *names: str) -> None:
        for name in names:
            if worker := self.workers.pop(name, None):
                worker.close()

    def content(self, why: str = "") -> Json:
        bench, rows = self.bench, [dict(row) for row in self.rows.values()]
        known: Json = {**bench.part, "reference": self.reference, "fresh_rounds": self.fresh}
        known |= {"seconds": time.perf_counter() - self.began, "rows": rows}
        why = report.incomplete(rows, bench.part, self.stop.why or why)
        return known | ({"complete": False, "incomplete": why} if why else {"complete": True})


def measure(bench: Bench[Any], plans: Sequence[Plan], stop: Stop,
            save: Callable[[Json], object] = lambda content: None) -> Json:  # fmt: skip
    turns = Turns(bench, stop, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()
