"""The same training with every backend or precision: the mode converge.

The learning rate decays over the steps; a candidate whose final loss is further from the baseline's
than the tolerance fails, a lower loss too. The workers are bench/train.py's.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import data
from bench import Json, tables, train
from bench.tables import MEMORY, QUARTILES, Column, Row, number, percent

if TYPE_CHECKING:
    from bench.rounds import Run

specs = train.specs
TITLE = "Final losses and the baseline's"
ROUNDS = 10  # parts of a training, interleaved
PATHS = {  # of --paths
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "residual_dtype": "float32"},
    "bfloat16-residual": {"dtype": "bfloat16", "residual_dtype": "autocast"},
}
COLUMNS: list[Column] = [
    ("final loss", lambda r: f"{r['final_loss']:.4f}"),
    ("off", lambda r: f"{r['difference']:+.3%}" if "difference" in r else "-"),
    ("seed noise", lambda r: f"{r['seed_noise']:.4f}" if "seed_noise" in r else "-"),
    ("verdict", lambda r: r.get("verdict", "-")),
    ("ms/step", lambda r: number(r["ms"])),
    *QUARTILES,
    ("time saved", lambda r: percent(r.get("time_saved"))),
    MEMORY,
    ("memory saved", lambda r: percent(r.get("memory_saved"))),
    ("kernel", tables.kernel_names),
]


def measure(run: Run) -> None:
    """The same training with every backend or path, for every seed."""
    config, batch = run.config, run.config.batch_size
    assert batch != "auto"
    folder = data.find(config.dataset, config.data_dir)
    data.load(folder, "train", run.model.block_size, run.part["vocab_size"])  # or raise UserError
    schedule: Json = {"max_iters": config.steps, "lr_decay_iters": config.steps}
    schedule["warmup_iters"] = config.steps // 10
    for seed in range(config.seed, config.seed + config.seeds):
        changes: Json = {**schedule, "seed": seed}
        if config.paths:
            exact = {"dtype": "float32", "tf32": False, "attention_backend": "manual"}
            plain = {**changes, **exact, "compile": False, "residual_dtype": "float32"}
            jobs = {"plain": run.job("converge", "plain", batch, "plain", **plain)}
            own = {"attention_backend": config.attention_backend}
            for path in config.paths:
                jobs[path] = run.job("converge", path, batch, **changes, **own, **PATHS[path])
        else:
            names = dict.fromkeys(["manual", *run.backends])
            jobs = {name: run.job("converge", name, batch, **changes) for name in names}
        # Not fresh: a training is one process.
        how: Json = {"rounds": ROUNDS, "fresh": False, "skip": lambda name, _: too_long(run, name)}
        run.measure(jobs, request={"steps": config.steps // ROUNDS}, **how)


def too_long(run: Run, name: str) -> str:
    return "" if name == "manual" else train.too_long(run, name)


def planned(settings: Json) -> int:
    """Return the number of rounds of a row: the parts of every seed's training."""
    return ROUNDS * settings.get("seeds", 1)


def final_loss(losses: list[float]) -> float:
    """Return the mean over the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def figures(row: Row, part: Json) -> Json:
    """Compute a row's figures from its rounds; a record has the losses of the first seed apart."""
    found = train.figures(row, part)
    seeds, rounds = part["settings"].get("seeds", 1), row["rounds"]
    if all("losses" in r for r in rounds) and len(rounds) >= ROUNDS * seeds:
        losses = [loss for r in rounds for loss in r["losses"]]
        steps = len(losses) // seeds
        runs = [losses[i * steps : (i + 1) * steps] for i in range(seeds)]
        found["losses"], finals = runs[0], [final_loss(run) for run in runs]
    elif "losses" in row:
        finals = [final_loss(row["losses"]), *row.get("final_losses", ())[1:]]
    else:  # a training that has not ended
        return found
    return found | {"final_losses": finals, "final_loss": statistics.fmean(finals)}


def allowed(base: Row, tolerance: float) -> float:
    """Return the allowed relative difference of final losses: `tolerance`, or with several seeds
    the standard deviation of the baseline's final losses."""
    finals = base["final_losses"]
    return statistics.stdev(finals) / base["final_loss"] if len(finals) > 1 else tolerance


def compare(rows: list[Row], settings: Json) -> None:
    """Compare final losses with the baseline's, manual or plain, in place."""
    parts = planned(settings)
    for row in rows:
        if row["status"] == "ok" and len(row["rounds"]) < parts:
            row |= {"status": "stopped", "why": [f"{len(row['rounds'])} of {parts} parts"]}
    plain = (r for r in rows if r["backend"] in ("manual", "plain") and r["status"] == "ok")
    base = next(plain, None)
    for row in rows:
        if row["status"] == "failed":
            row["verdict"] = "FAIL"
        elif row["status"] == "ok" and base is not None:
            row["difference"] = row["final_loss"] / base["final_loss"] - 1
            if settings.get("seeds", 1) > 1:
                row["seed_noise"] = statistics.stdev(base["final_losses"])
            good = abs(row["difference"]) <= allowed(base, settings["tolerance"])
            row["verdict"] = "baseline" if row is base else "ok" if good else "FAIL"
            row["time_saved"] = 1 - row["ms"] / base["ms"]
            if "memory_bytes" in row and "memory_bytes" in base:
                row["memory_saved"] = 1 - row["memory_bytes"] / base["memory_bytes"]
