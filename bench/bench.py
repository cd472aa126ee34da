"""One run of the bench: what all modes need, and the rounds that they ask for."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import candidates, hf, plan, rows, tables
from bench.config import BenchConfig
from bench.process import Failure, Key, Outcome, Stop, Worker, measure
from core import flops
from core.settings import UserError


@dataclass
class Bench:
    """One run of the bench: what all modes need, and what they add to."""

    mode: str
    config: BenchConfig
    device: str
    vocab_size: int
    backends: list[str]
    memory_limit: int | None  # bytes that a worker may allocate; on the CPU only
    watch: Callable[[str], None]
    machine: dict[str, Any] = field(default_factory=dict)  # what begin() found
    refused: dict[str, list[str]] = field(default_factory=dict)  # by what they declare, with why
    hf: dict[str, Any] = field(default_factory=dict)  # --hf: its name, its config, what was counted
    fresh: bool = False
    reference: dict[str, Any] = field(default_factory=dict)  # what the rows are compared with
    earlier: list[rows.Row] = field(default_factory=list)  # of the parts before
    stop: Stop = field(default_factory=Stop)  # ends the run
    tell: Callable[[str], None] = lambda line: None  # reports a result
    keep: Callable[[Bench, list[rows.Row]], None] = lambda bench, table: None  # after each round
    points: list[dict[str, Any]] = field(default_factory=list)  # kernel: not the settings'
    run: str = field(default_factory=lambda: secrets.token_hex(4))  # rounds of two runs show
    began: float = field(default_factory=time.perf_counter)

    @property
    def peak(self) -> flops.Peak:
        return flops.Peak(*(self.machine[f"peak_{of}"] for of in ("tflops", "source", "measured")))

    @property
    def model(self) -> Any:
        """GPTConfig, or what stands for it."""
        if "counted" in self.hf:
            return hf.Counted(**self.hf["counted"])
        return self.config.train.model(self.vocab_size)

    def content(self, table: list[rows.Row], why: str = "") -> dict[str, Any]:
        """The content of this run's record; `why` it is not complete, where that is known."""
        model, rounds = self.model, self.config.rounds
        none = sum(r["status"] == "stopped" for r in table)
        why = why or self.stop.why or "its time was over" * bool(none)
        content = {
            "mode": self.mode,
            "seconds": time.perf_counter() - self.began,
            "machine": dict(self.machine),  # as the rows were reckoned: a later look may better it
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
            missing = [f"{none} of {len(table)} rows were not measured"] * bool(none)
            missing += [f"{few} have fewer than {rounds} rounds"] * bool(few)
            content["incomplete"] = "; ".join([why, *missing])
        return content

    def job(
        self, kind: str, name: str, batch_size: int = 1, baseline: str = "", **changes: Any
    ) -> dict[str, Any]:
        """What a worker gets: everything, so that it reads no settings itself.

        Args:
            kind: of bench/worker.py's jobs.
            name: of the row; without a baseline, also the attention backend to measure.
            baseline: what bench/candidates.py builds instead of our model.
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
        """Look at the machine; the worker that did can be asked which backends it refuses."""
        self.watch("the machine")
        probe = Worker(self.config.timeout, self.stop).begin(self.job("machine", ""))
        self.machine = probe.about
        self.machine["memory_limit"] = self.memory_limit or self.machine["free_memory"]
        return probe

    def everyone(self, implementations: tuple[str, ...] = candidates.HF) -> dict[str, str]:
        """The rows, backends and baselines, and what candidates.build() takes for each."""
        if self.hf:
            return hf.rows_of(self.backends)
        others = candidates.parse(self.config.baseline, implementations)
        return dict.fromkeys(self.backends, "") | others

    def count(self) -> None:
        """Have the model of --hf counted, and its batch computed by eager attention in float32."""
        config = self.config
        batch = (config.fixed_batch or 1) * config.train.gradient_accumulation_steps
        try:
            self.reference = self.ask_once("reference", batch if self.mode == "train" else 1)
        except Failure as e:
            if e.kind == "stopped":
                raise
            raise UserError(f"--hf={config.hf}: {e}") from None
        self.hf["counted"] = self.reference.pop("counted")

    def ask_once(self, kind: str, batch_size: int = 1) -> dict[str, Any]:
        """The answer of a worker that only sets up its job."""
        self.watch(f"the {kind}")
        worker = Worker(self.config.timeout, self.stop).begin(self.job(kind, "", batch_size))
        worker.close()
        return worker.about

    def look_again(self) -> None:
        """Measure the machine's rates once more, after the rounds, and keep the better of both:
        where another process was busy the peak came out too low and every MFU too high. Done once,
        so that all rows have the same peak."""
        m, decode = self.machine, self.mode == "decode"
        measured = not self.config.bandwidth_gbs if decode else self.peak.measured
        if m.get("looked_again") or self.stop.why or not measured:
            return
        again, m["looked_again"] = self.ask_once("machine"), True
        for rate, source in (("peak_tflops", "peak_source"), ("bandwidth", "bandwidth_source")):
            if m.get(rate) and (again[rate] or 0) > m[rate]:  # a mode may not ask for it
                m |= {rate: again[rate], source: again[source]}

    def measure(
        self,
        found: dict[Key, Outcome],
        jobs: dict[str, dict[str, Any]],
        points: dict[str, dict[str, Any]],
        row: Callable[[str, str, Outcome], rows.Row],
        rounds: int | None = None,
        fresh: bool | None = None,
        judge: Callable[[list[rows.Row]], Any] = lambda table: None,
    ) -> list[rows.Row]:
        """Run the rounds, as far as the bench is not stopped; what the table is then.

        Args:
            found: the outcome of each pair of job and point, a row each; more is added to it.
            points: what is asked of a worker, by name.
            row: makes the row of a pair; `judge`, told of all rows, adds to them.
            rounds: None: as many as the settings say.
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
                self.keep(self, [*self.earlier, *table()])

        _, used = measure(
            {name: job for name, job in jobs.items() if name not in self.refused},
            points,
            rounds or self.config.rounds,
            outcomes=found,
            ahead=self.device.startswith("cuda"),
            fresh=fresh,
            budget=int(0.9 * self.machine["memory_limit"]),
            timeout=self.config.timeout,
            stop=self.stop,
            skip=lambda name, point: plan.too_long(self, name, points[point], found),
            watch=self.watch,
            known=known,
            after_round=after_round,
        )
        self.fresh = self.fresh or used
        with suppress(Failure):  # the bench was stopped
            self.look_again()
        return table()
