"""The mode converge: final losses of the same training with every backend or precision."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import data
from bench import Json, machine, tables, train
from bench.candidates import Bench, Candidate, Mark, Ours, Plan
from bench.tables import Row
from core.optimizer import build_optimizer, set_learning_rate

ROUNDS = 10  # parts of a training, interleaved
PATHS: dict[str, Json] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "residual_dtype": "float32"},
    "bfloat16-residual": {"dtype": "bfloat16", "residual_dtype": "autocast"},
}
EXACT: Json = {"attention_backend": "manual", "dtype": "float32", "tf32": False}
EXACT |= {"residual_dtype": "float32", "compile": False}


def plans(bench: Bench) -> list[Plan]:
    config, how = bench.config, train.steps(bench) | {"one_process": True}
    data.load(data.find(config.dataset, config.data_dir), "train", bench.model.block_size,
              bench.vocab_size)  # fmt: skip
    how["longest"].pop("manual", None)
    found = []
    for seed in range(config.seed, config.seed + config.seeds):
        same: Json = {"max_iters": config.steps, "lr_decay_iters": config.steps, "seed": seed}
        same |= {"warmup_iters": config.steps // 10, "batch_size": config.batch_size}
        rows = {name: {"attention_backend": name} for name in ("manual", *bench.backends)}
        if config.paths:
            rows = {path: PATHS[path] for path in config.paths}
        who: dict[str, Candidate] = {n: Ours(bench, n, **same | own) for n, own in rows.items()}
        if config.paths:
            who = {"plain": Plain(bench, "plain", **same | EXACT)} | who
        found.append(Plan(Converging, who, ROUNDS, **how))
    return found


def figures(row: Row, part: Json) -> Json:
    """A record keeps the first seed's losses apart from its rounds."""
    found, rounds = train.figures(row, part), row["rounds"]
    runs = [row["losses"]] if "losses" in row else []
    finals = row.get("final_losses", ())
    if all("losses" in r for r in rounds) and len(rounds) >= MODE.rounds(part["settings"]):
        losses = [loss for r in rounds for loss in r["losses"]]
        steps = ROUNDS * len(losses) // len(rounds)
        runs, finals = [losses[i : i + steps] for i in range(0, len(losses), steps)], ()
        found["losses"] = runs[0]
    if not runs:  # unfinished
        return found
    finals = [*(statistics.fmean(run[-max(1, len(run) // 10) :]) for run in runs), *finals[1:]]
    return found | {"final_losses": finals, "final_loss": statistics.fmean(finals)}


def compare(rows: list[Row], settings: Json) -> None:
    """Allowed: the tolerance, or the baseline's deviation over seeds."""
    parts = MODE.rounds(settings)
    for row in rows:
        if row["status"] == "ok" and len(row["rounds"]) < parts:
            row |= {"status": "stopped", "why": [f"{len(row['rounds'])} of {parts} parts"]}
        row |= {"verdict": "FAIL"} if row["status"] == "failed" else {}
    ok = [row for row in rows if row["status"] == "ok"]
    base: Any = next((row for row in ok if row["backend"] in ("manual", "plain")), None)
    for row in ok if base else ():
        row["difference"] = row["final_loss"] / base["final_loss"] - 1
        allowed = settings["tolerance"]
        if settings.get("seeds", 1) > 1:
            row["seed_noise"] = statistics.stdev(base["final_losses"])
            allowed = row["seed_noise"] / base["final_loss"]
        good = abs(row["difference"]) <= allowed
        row["verdict"] = "baseline" if row is base else "ok" if good else "FAIL"
        for name, of in (("time_saved", "ms"), ("memory_saved", "memory_bytes")):
            if of in row and of in base:
                row[name] = 1 - row[of] / base[of]


def verdict(content: Json) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for r in content["rows"]:
        names[r.get("verdict", "") if r["status"] == "ok" else r["status"]].append(r["backend"])
    if not names["baseline"]:
        return "Agreement: no verdict, for the baseline did not end."
    within = f"{content['settings']['tolerance']:.2%}"
    if noise := next((r["seed_noise"] for r in content["rows"] if "seed_noise" in r), None):
        within = f"{noise:.4f}, as far as the seeds scatter,"
    base = names["baseline"][0]
    if bad := ", ".join(names["FAIL"]):
        return f"Agreement: FAIL: {bad} ended further than {within} from {base}."
    if lost := ", ".join([*names["failed"], *names["stopped"]]):
        return f"Agreement: no verdict on {lost}, which did not end."
    if not (good := ", ".join(names["ok"])):
        return f"Agreement: no verdict: nothing was compared with {base}."
    return f"Agreement: {good}: every final loss is within {within} of {base}'s."


MODE = tables.Mode(
    title="Final losses and the baseline's",
    columns="final loss, off, seed noise, verdict, ms/step, quartiles, rounds, time saved, memory, "
    "memory saved, kernel",
    notes="final loss: mean of the last tenth of the steps; off: from the baseline's; saved: share "
    f"of the baseline's; {tables.EXPLAINED}",
    board="final loss, off, verdict",
    plans=plans,
    figures=figures,
    rounds=lambda settings: ROUNDS * settings.get("seeds", 1),
    compare=compare,
    conclude=verdict,
)


# --- in the worker ---


class Plain(Candidate):
    """Our model with PyTorch's own loss and AdamW."""

    def make_optimizer(self) -> torch.optim.AdamW:
        ours = build_optimizer(self.model, self.config, self.device)
        if self.config.optimizer == "muon":  # PyTorch's has other rates
            return ours
        groups = [{k: g[k] for k in ("params", "weight_decay")} for g in ours.param_groups]
        betas = (self.config.beta1, self.config.beta2)
        return torch.optim.AdamW(groups, betas=betas, foreach=False, fused=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.run(x)[0].flatten(0, 1), y.flatten())


class Converging(train.Training):
    def __init__(self, who: Candidate) -> None:
        super().__init__(who)
        config, self.done = who.config, 0
        folder = data.find(config.dataset, config.data_dir)
        tokens = data.load(folder, "train", config.block_size, who.bench.vocab_size)
        n = config.batch_size * self.micro
        self.batches = data.Batches(tokens, config.block_size, n, config.seed, self.device)

    def round(self, request: Json) -> Json:
        numbers = range(self.done, self.done + self.settings.steps // ROUNDS)
        answer, losses = self.timed([(x, y) for x, y, *_ in map(self.batches.get, numbers)])
        return answer | {"losses": [float(loss) for loss in losses]}

    def warm_up(self, request: Json) -> Json:
        if self.compiled:
            with self.who.setup.autocast:
                self.who.loss(*self.batches.get(0)).backward()
            self.who.optimizer.zero_grad(set_to_none=True)
        answer: Json = {"compiled": self.compiled, "batch_size": self.who.config.batch_size}
        peak = machine.memory(self.device)
        return answer | {"peak_bytes": peak} | self.who.evidence(self.who.chosen())

    def step(self, x: Tensor, y: Tensor, mark: Mark = lambda part: None) -> Tensor:
        set_learning_rate(self.who.optimizer, self.done, self.who.config)
        self.done += 1
        return super().step(x, y, mark)
