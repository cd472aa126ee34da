"""State of a run of the bench, and the methods that all modes share."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import Json, candidates, hf, limits, rows, tables
from bench.config import BenchConfig
from bench.process import Failure, Key, Outcome, Stop, Worker, measure
from core import flops
from core.settings import UserError


@dataclass
class Bench:
    """A run of the bench."""

    mode: str
    config: BenchConfig
    device: str
    vocab_size: int
    backends: list[str]
    memory_limit: int | None  # bytes per worker; None: unlimited
    watch: Callable[[str], None]
    machine: Json = field(default_factory=dict)  # set by begin()
    refused: dict[str, list[str]] = field(default_factory=dict)  # with reasons
    hf: Json = field(default_factory=dict)  # --hf: name, config, counted
    fresh: bool = False  # rounds had new processes
    reference: Json = field(default_factory=dict)  # loss, gradient norm
    stop: Stop = field(default_factory=Stop)
    tell: Callable[[str], None] = lambda line: None  # prints a result
    keep: Callable[[Bench, list[rows.Row]], None] = lambda bench, table: None  # after each round
    points: list[Json] = field(default_factory=list)  # kernel: instead of the settings'
    run: str = field(default_factory=lambda: secrets.token_hex(4))  # id
    began: float = field(default_factory=time.perf_counter)

    @property
    def peak(self) -> flops.Peak:
        return flops.Peak(*(self.machine[f"peak_{of}"] for of in ("tflops", "source", "measured")))

    @property
    def model(self) -> Any:
        """GPTConfig, or the sizes of the model of --hf."""
        if "counted" in self.hf:
            return hf.Counted(**self.hf["counted"])
        return self.config.train.model(self.vocab_size)

    def content(self, table: list[rows.Row], why: str = "") -> Json:
        """Return the content of the record; `why`: the reason if it is incomplete."""
        model, rounds = self.model, self.config.rounds
        none = sum(r["status"] == "stopped" for r in table)
        why = why or self.stop.why or ("the time limit was reached" if none else "")
        content = {
            "mode": self.mode,
            "seconds": time.perf_counter() - self.began,
            "machine": dict(self.machine),  # a copy: look_again() changes it
            "vocab_size": self.vocab_size,
            "settings": self.config.flat(),
            "fresh_rounds": self.fresh,
            "flops_per_token": {
                "mfu": flops.flops_per_token(model, model.block_size),
                "mfu_causal": flops.flops_per_token(model, model.block_size, causal=True),
            },
            "reference": self.reference,
            **({"hf": self.hf} if self.hf else {}),
            "rows": table,
            "complete": not why,
        }
        content["answers"] = tables.answers(content)
        if why:
            few = sum(r["status"] == "ok" and len(r["rounds"]) < rounds for r in table)
            missing = [f"{none} of {len(table)} rows were not measured"] if none else []
            missing += [f"{few} have fewer than {rounds} rounds"] if few else []
            content["incomplete"] = "; ".join([why, *missing])
        return content

    def job(
        self, kind: str, name: str, batch_size: int = 1, baseline: str = "", **changes: Any
    ) -> Json:
        """Return a worker's job.

        Args:
            kind: one of bench/worker.py's JOBS.
            name: the row; without a baseline also the attention backend.
            baseline: argument of candidates.build().
            changes: of train.py's settings.
        """
        ours = {"attention_backend": name} if name and not baseline else {}
        changes = {**ours, "attention_fallback": False, **changes}
        return {
            "job": kind,
            "run": self.run,
            "name": name,
            "baseline": baseline,
            "train": asdict(self.config.training(batch_size, **changes)),
            "device": self.device,
            "vocab_size": self.vocab_size,
            "hf": self.hf,
            "weights": self.config.weights,
            "memory_limit": self.memory_limit,
            "profile": self.config.profile,
            "bandwidth_gbs": self.config.bandwidth_gbs,
            "wants_bandwidth": self.mode in ("decode", "qualify") or self.config.profile,
        }

    def begin(self) -> Worker:
        """Describe the machine; return the worker, which can list refused backends."""
        self.watch("the machine")
        probe = Worker(self.config.timeout, self.stop).begin(self.job("machine", ""))
        self.machine = probe.about
        self.machine["memory_limit"] = self.memory_limit or self.machine["free_memory"]
        return probe

    def everyone(self, implementations: tuple[str, ...] = candidates.HF) -> dict[str, str]:
        """Return {row: argument of candidates.build()} of backends and baselines."""
        if self.hf:
            return hf.rows_of(self.backends)
        others = candidates.parse(self.config.baseline, implementations)
        return dict.fromkeys(self.backends, "") | others

    def count(self) -> None:
        """Count the model of --hf, and compute its loss with eager attention in float32."""
        config = self.config
        batch = config.batch_size * config.train.gradient_accumulation_steps
        try:
            self.reference = self.ask_once("reference", batch if self.mode == "train" else 1)
        except Failure as e:
            if e.kind == "stopped":
                raise
            raise UserError(f"--hf={config.hf}: {e}") from None
        self.hf["counted"] = self.reference.pop("counted")

    def ask_once(self, kind: str, batch_size: int = 1) -> Json:
        """Set up a job in a worker and return its answer."""
        self.watch(f"the {kind}")
        worker = Worker(self.config.timeout, self.stop).begin(self.job(kind, "", batch_size))
        worker.close()
        return worker.about

    def look_again(self) -> None:
        """Measure peak and bandwidth again after the rounds and keep the better, once per run.

        A busy machine gives too low a peak, and so too high an MFU.
        """
        m, decode = self.machine, self.mode == "decode"
        measured = not self.config.bandwidth_gbs if decode else self.peak.measured
        if m.get("looked_again") or self.stop.why or not measured:
            return
        again, m["looked_again"] = self.ask_once("machine"), True
        if self.peak.measured and again["peak_tflops"]:
            after = flops.Peak(again["peak_tflops"], again["peak_source"])
            m["peak_doubt"] = flops.differ(self.peak, after)
        for rate, source in (("peak_tflops", "peak_source"), ("bandwidth", "bandwidth_source")):
            if m[rate] and (again[rate] or 0) > m[rate]:  # a stage of qualify may not measure it
                m |= {rate: again[rate], source: again[source]}

    def measure(
        self,
        found: dict[Key, Outcome],
        jobs: dict[str, Json],
        points: dict[str, Json],
        row: Callable[[str, str, Outcome], rows.Row],
        rounds: int | None = None,
        fresh: bool | None = None,
        judge: Callable[[list[rows.Row]], object] = lambda table: None,
    ) -> list[rows.Row]:
        """Run the rounds until the bench is stopped; return the rows.

        Args:
            found: outcomes so far, a row each; filled in.
            row: makes the row of a pair; judge: adds to all rows.
        """
        for point, name in itertools.product(points, jobs):
            outcome = found.setdefault((name, point), Outcome())
            if name in self.refused:
                outcome.failure = Failure("unavailable", self.refused[name])
        told = set[str]()

        def table() -> list[rows.Row]:
            made = [row(*pair, outcome) for pair, outcome in found.items()]
            judge(made)
            return made

        def known(name: str, point: str) -> None:
            outcome, where = found[name, point], f"{name} {point}".strip()
            if (e := outcome.failure) is None:
                ms = rows.begin(self.mode, name, {}, outcome)["ms"]
                self.tell(f"{where}: {ms:.4g} ms, the median of {len(outcome.rounds)} rounds")
            elif e.kind != "stopped" and str(e) not in told:
                told.add(str(e))
                self.tell(f"{where}: {e.kind}: {e}")

        def after_round() -> None:
            if not self.stop.why:
                self.keep(self, table())

        used = measure(
            {name: job for name, job in jobs.items() if name not in self.refused},
            points,
            rounds or self.config.rounds,
            found,
            ahead=self.device.startswith("cuda"),
            fresh=fresh,
            budget=int(0.9 * self.machine["memory_limit"]),
            timeout=self.config.timeout,
            stop=self.stop,
            skip=lambda name, point: limits.too_long(self, name, points[point], found),
            watch=self.watch,
            known=known,
            after_round=after_round,
        )
        self.fresh = self.fresh or used
        with suppress(Failure):  # the bench was stopped
            self.look_again()
        return table()
