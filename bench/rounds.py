"""What is here; then candidates in turn, A B C A B C: a drifting clock affects all alike."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench import Json, machine, parts, report, rivals, tables
from bench.candidates import Bench, Ours, Plan, names
from bench.settings import Measured
from bench.tables import Row
from bench.workers import GRACE, Failure, Stop, Worker, largest, once
from core.settings import UserError

SHOWN = 2  # rounds of a shown row
TOGETHER = 3
Save = Callable[[Json], object]  # of the record after every round


def begin(mode: str, config: Measured, device: torch.device, stop: Stop) -> Bench:
    rivals.named(getattr(config, "rival", ()))  # before minutes of work
    backends, left_out = names(config, device.type)
    vocab_size, source = parts.vocabulary(config)
    found: Json = {}
    if model := getattr(config, "hf", None):
        found = {"name": model, "config": rivals.read(model)}
        vocab_size, source = found["config"]["vocab_size"], f"--hf={model}"
    if mode != "kernel":
        stop.tell(f"vocabulary: {vocab_size:,} ({source})")
    limit = None
    if device.type == "cpu":
        free = 0.7 * machine.free_memory(device)
        limit = int(1e9 * config.memory_gb if config.memory_gb else free)
    elif config.memory_gb:
        raise UserError(f"--memory_gb limits processes on the CPU, got --device={device}")
    here = {"memory_limit": limit}
    bench = Bench(mode, config, device, backends, left_out, vocab_size, found, here)
    if mode in report.MODES and not model:
        report.MODES[mode].plans(bench)  # mistakes, before the machine is measured
    bench = replace(bench, machine=once(machine.about, Ours(bench), stop) | here)
    batch = config.global_batch if mode == "train" and not bench.auto else 1
    reference = once(rivals.reference, Ours(bench, batch_size=batch), stop) if model else {}
    if model:
        found["counted"] = reference.pop("counted")
    if mode == "train" and bench.auto:
        reference = {"why": "each backend has a batch of its own (--batch_size=auto)"}
    return replace(bench, reference=reference)


def key(row: Row) -> str:
    return tables.where(row["point"], row["backend"])


class Turns:
    def __init__(self, bench: Bench, stop: Stop, save: Save | None) -> None:
        self.bench, self.stop, self.save, self.began = bench, stop, save, time.perf_counter()
        self.rows: dict[str, Row] = {}
        self.ended: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.free = 0  # bytes of the device, after a round
        self.crowded = False  # sleeping processes do not fit into memory
        self.took: dict[bool, float] = {}  # seconds of the last group but for failures, by: new?
        self.together = False  # several warm up

    def run(self, plan: Plan) -> None:
        self.plan, its = plan, dict[str, Row]()
        for point, name in itertools.product(plan.points, plan.candidates):
            row = {"mode": self.bench.mode, "backend": name, "point": point}
            row |= {"status": "stopped", "why": ["no round was measured"], "rounds": []}
            its[key(row)] = self.rows.setdefault(key(row), row)
        rows = [*its.values()]
        done = max((len(row["rounds"]) for row in rows), default=0)
        self.target = done + plan.rounds
        first = done + min(plan.rounds, SHOWN if self.stop.left < math.inf else 1)
        try:
            while waiting := self.waiting(rows, first):
                alone = not self.bench.cuda or self.bench.auto or self.crowded
                few = waiting[: 1 if alone else TOGETHER]
                group = [*{row["backend"]: row for row in few[::-1]}.values()][::-1]
                self.since, new = time.monotonic(), group[0]["backend"] not in self.workers
                self.prepare(group)
                self.turns(group, first)
                if any(row["rounds"] for row in group):
                    self.took[new] = time.monotonic() - self.since
                self.refer()
            while waiting := self.waiting(rows, self.target):
                self.turns(waiting, self.target)
        finally:
            self.drop(*self.workers)

    def waiting(self, rows: Sequence[Row], rounds: int) -> list[Row]:
        return [r for r in rows if key(r) not in self.ended and len(r["rounds"]) < rounds]

    def turns(self, rows: Sequence[Row], rounds: int) -> None:
        for n in range(1, rounds + 1):
            waiting = self.waiting(rows, n)
            for row in filter(lambda row: self.waiting([row], n), rows):  # lazily: see make_room()
                if not self.is_warm(row):
                    self.prepare([row])
                if self.is_warm(row):
                    self.attempt(self.round, row)
                self.make_room()
            if self.save and waiting and not self.stop.why:
                self.save(self.content("the run had not ended"))

    def is_warm(self, row: Row) -> bool:
        worker = self.workers.get(row["backend"])
        return worker is not None and key(row) in worker.warm

    def attempt(self, do: Callable[[Row], None], row: Row) -> bool:
        began = time.monotonic()
        try:
            if key(row) not in self.ended:
                do(row)
                return True
        except Failure as e:
            self.since += time.monotonic() - began
            self.failed(row, e)
        return False

    def prepare(self, group: list[Row]) -> None:
        started = [row for row in group if self.attempt(self.start, row)]
        if self.bench.cuda:
            self.refer(again=True)
        self.together = len(started) > 1
        for row in started:
            self.attempt(self.finish, row)
        self.together = False

    def start(self, row: Row) -> None:
        """Send the warm-up. Failure: not worth a process, or time is up."""
        name, plan, stop = row["backend"], self.plan, self.stop
        who = plan.candidates[name]
        stop.check(math.inf)  # for signals only
        if not row["rounds"]:
            longest, spec = plan.longest.get(who.name), plan.spec(row["point"])
            if refused := machine.refusal(who, row["point"], spec, longest):
                raise Failure(*refused)
            if why := plan.skip(row, [*self.rows.values()]):
                raise Failure("skipped", why)
            left, need = max(stop.left, 0.0), self.took.get(name not in self.workers, 0.0)
            if left < need:
                raise Failure("stopped", f"it takes about {need:.0f} s, and {left:.0f} s were left")
        stop.check()
        stop.watch(f"warm-up: {key(row)}")
        if self.bench.auto and "batch_size" not in row:
            row["batch_size"] = largest(plan, who, stop, self.request(row))
        if name not in self.workers:
            self.workers[name] = Worker(plan.work, who, stop)
        self.workers[name].send("warm_up", self.request(row))

    def finish(self, row: Row) -> None:
        worker = self.workers[row["backend"]]
        most = max(self.stop.left / 3, GRACE) if self.together else math.inf  # others wait
        warm = self.seen(row, worker.receive(most))
        worker.warm.add(key(row))
        if "setup_s" not in row:
            row |= {name: value for name, value in warm.items() if name != "peak_bytes"}

    def round(self, row: Row) -> None:
        self.stop.watch(f"round {len(row['rounds']) + 1}: {key(row)}")
        self.stop.check(0.0 if row["rounds"] else math.inf)  # a warm-up is not lost: GRACE
        worker = self.workers[row["backend"]]
        answer = self.seen(row, worker.ask("round", self.request(row)))
        self.free = worker.free_bytes
        row |= {"status": "ok", "rounds": [*row["rounds"], answer]}
        row.pop("why", None)
        if len(row["rounds"]) == min(SHOWN, self.plan.rounds):
            found, n = tables.medians(row), tables.count(len(row["rounds"]), "round")
            noisy = f", {found['spread']:.0%} apart: noisy" if found["noisy"] else ""
            self.stop.tell(f"{key(row)}: {found['ms']:.4g} ms ({n}{noisy})")

    def request(self, row: Row) -> Json:
        found = {"B": row["batch_size"]} if self.bench.auto and "batch_size" in row else {}
        return row["point"] | found | {"first": not row["rounds"]}

    def seen(self, row: Row, answer: Json) -> Json:
        row |= answer.pop("about", {})
        if peak := answer.get("peak_bytes", 0):
            row["memory_bytes"] = max(row.get("memory_bytes", 0), peak)
        return answer

    def failed(self, row: Row, e: Failure) -> None:
        """End a row; out of memory it waits for another turn, alone, or with a smaller batch."""
        name, full = row["backend"], "out of memory" in str(e)
        n = row.get("batch_size", 1) if self.bench.auto and not row["rounds"] else 1
        beside = self.bench.cuda and len(self.workers) > 1  # others hold memory too
        if e.kind == "failed" or not e.built:
            self.drop(name)
        if full and (beside or n > 1):  # several steps need more than one
            self.crowded |= beside and not self.together
            if self.plan.one_process or not row["rounds"]:
                row |= {"status": "stopped", "why": [str(e)], "rounds": []}
            if not beside:
                row.pop("setup_s", None)
                row["batch_size"] = n * 3 // 4
            return
        same = [r for r in self.rows.values() if r["backend"] == name and not r["rounds"]]
        for its in (row, *(same if not e.built else ())):
            self.ended.add(key(its))
            if e.kind != "stopped" or not its["rounds"]:  # else its rounds so far count
                its |= {"status": e.kind, "why": [str(e)], "rounds": []}
        if e.kind not in ("stopped", "unavailable"):
            self.stop.tell(f"{key(row)}: {e.kind}: {e}")

    def make_room(self) -> None:
        """End processes that do not fit; with one_process after all rounds."""
        largest = max(row.get("memory_bytes", 0) for row in self.rows.values())
        self.crowded |= len(self.plan.candidates) > 1 and 0 < self.free < 1.1 * largest
        if not self.crowded:
            return
        for row in self.rows.values() if self.plan.one_process else ():
            while self.is_warm(row) and len(row["rounds"]) < self.target:
                if not self.attempt(self.round, row):
                    break
        self.drop(*self.workers)

    def drop(self, *names: str) -> None:
        for worker in (self.workers.pop(name) for name in names if name in self.workers):
            worker.close()

    def refer(self, again: bool = False) -> None:
        if self.bench.reference or not self.plan.reference:
            return
        try:
            found = once(rivals.reference, self.plan.reference, self.stop)
        except Failure as e:
            if again and "out of memory" in str(e):  # beside warm-ups
                return
            found = {"why": str(e)}
        self.bench = replace(self.bench, reference=found)

    def content(self, why: str = "") -> Json:
        bench, rows = self.bench, [dict(row) for row in self.rows.values()]
        known, fresh = bench.part, self.crowded and not self.plan.one_process
        known |= {"fresh_rounds": fresh, "seconds": time.perf_counter() - self.began, "rows": rows}
        why = report.incomplete(rows, bench.part, self.stop.why or why)
        return known | ({"complete": False, "incomplete": why} if why else {"complete": True})


def measure(bench: Bench, plans: Sequence[Plan], stop: Stop, save: Save | None = None) -> Json:
    turns = Turns(bench, stop, save)
    for plan in plans:
        turns.run(plan)
    return turns.content()
