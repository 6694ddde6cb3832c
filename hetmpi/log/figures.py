"""The figures of a run: the key, name, unit and text format of each."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace

from hetmpi.spans import PARTS

EARLIER = ("reduced_bytes", "replicated_rows")  # in run folders of earlier versions, and no metrics of a task
MOVED = ("pulled_bytes", "pushed_bytes")  # traffic between ranks, without that of the dense layers


def number_text(value: float) -> str:
    """A number with four significant digits, or rounded to an integer from 1000 on: 0.01234, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units: 1,234,567 is '1.2 MB'."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.1f} {' kMGT'[power]}B"


def megabytes_text(count: float) -> str:
    """A number of bytes, always in MB so that values compare easily: 35,021 is '0.035 MB'."""
    mb = count / 1e6
    return f"{mb:.0f} MB" if mb == 0 or mb >= 100 else f"{mb:.3g} MB" if mb >= 0.001 else "less than 0.001 MB"


@dataclass(frozen=True)
class Figure:
    """One figure.

    name   plain name, with the unit if the text of a value has none
    group  group of its tag in TensorBoard
    text   formats a value
    word   label of the value in a log line; None: the figure is not displayed there
    best   for a metric of the task: max or min, whichever returns the better of two values; None: neither"""

    name: str
    group: str
    text: Callable[[float], str] = number_text
    word: str | None = None
    best: Callable | None = None


FIGURES = {  # log lines display those with a word, in this order
    "loss": Figure("training loss", "quality", "{:.4f}".format, "loss"),
    "step_ms": Figure("time of a step", "speed", "{:.1f} ms".format, ""),
    "samples_per_s": Figure("samples per second, all ranks", "speed", "{:,.0f} samples/s".format, ""),
    "hit_rate": Figure("cacheable reads served from the cache", "cache", "{:.1%}".format, "hit"),
    "stale_rate": Figure("reads that found a row too old in the cache", "cache", "{:.1%}".format, "stale"),
    "lag_p50": Figure("staleness of a read, median (iterations)", "cache"),
    "lag_p99": Figure("staleness of a read, 99th percentile (iterations)", "cache", "{:.0f}".format, "lag p99"),
    "pulled_bytes": Figure("pulled: rows and clocks fetched from other ranks", "traffic", bytes_text, "pulled"),
    "pushed_bytes": Figure("pushed: gradients sent to other ranks", "traffic", bytes_text, "pushed"),
    "row_bytes": Figure("pulled bytes: rows only", "traffic", bytes_text),
    "clock_bytes": Figure("pulled bytes: clocks only", "traffic", bytes_text),
    "disk_wait_rate": Figure("steps in which a rank waited for the disk", "disk", "{:.1%}".format, "disk waits"),
    "pages_read": Figure("pages of rows read from disk per step, all ranks", "disk"),
    "pages_written": Figure("pages of rows written to disk per step, all ranks", "disk"),
    "auc": Figure("AUC on held-out data", "quality", "{:.4f}".format, "auc", max),
    "log_loss": Figure("log loss on held-out data (nats)", "quality", "{:.4f}".format, "log loss", min),
    "normalised_entropy": Figure("log loss over that of the share of label 1", "quality", "{:.4f}".format, "NE", min),
    "calibration": Figure("mean prediction over the share of label 1", "quality", "{:.4f}".format, "calibration"),
    "gauc": Figure("mean AUC over the groups of eval.group", "quality", "{:.4f}".format, "gauc", max),
    "teacher_auc": Figure("AUC of the true probabilities", "quality", "{:.4f}".format, "teacher auc"),
    "accuracy": Figure("accuracy on held-out data", "quality", "{:.4f}".format, "accuracy", max),
    "micro_f1": Figure("F1 of all classes together", "quality", "{:.4f}".format, "micro F1", max),
    "macro_f1": Figure("mean of the F1 of the classes", "quality", "{:.4f}".format, "macro F1", max),
    "test_accuracy": Figure("accuracy on test nodes, with all neighbours", "quality", "{:.4f}".format, "", max),
    "test_micro_f1": Figure("F1 of all classes, test nodes", "quality", "{:.4f}".format, "", max),
    "test_macro_f1": Figure("mean of the F1 of the classes, test nodes", "quality", "{:.4f}".format, "", max),
    **{
        f"{part}{name}": Figure(
            f"{text}{of}", "quality", "{:.4f}".format, "" if part == "test_" else f"{part}{name}".replace("_", " "), max
        )
        for part, of in (
            ("", " on held-out data"),
            ("sampled_", ", among some entities"),
            ("test_", " on test triples"),
        )
        for name, text in (
            ("mrr", "mean reciprocal rank"),
            *((f"hits_at_{k}", f"share of ranks of at most {k}") for k in (1, 3, 10)),
        )
    },
    "recall_at_10": Figure("share of ranks of at most 10, HR@10", "quality", "{:.4f}".format, "recall@10", max),
    "recall_at_100": Figure("share of ranks of at most 100, HR@100", "quality", "{:.4f}".format, "recall@100", max),
    "ndcg_at_10": Figure("mean of 1 / log2(1 + rank) of ranks up to 10", "quality", "{:.4f}".format, "NDCG@10", max),
    "of_samples": Figure("held-out samples of a quick evaluation", "progress", "{:,.0f}".format, "sample of"),
    "unseen": Figure(
        "held-out rows whose item is in no training row or history", "quality", "{:,.0f}".format, "unseen", min
    ),
    "mr": Figure("mean rank on held-out triples", "quality", number_text, "mr", min),
    "sampled_mr": Figure("mean rank, among some entities", "quality", number_text, "sampled mr", min),
    "test_mr": Figure("mean rank on test triples", "quality", number_text, "", min),
    "test_unseen": Figure("test triples with an entity that was not trained", "quality", "{:,.0f}".format, ""),
    "test_mrr_seen": Figure("mean reciprocal rank on the other test triples", "quality", "{:.4f}".format, "", max),
    **{
        f"test_mrr_{kind}": Figure(f"mean reciprocal rank on test triples of {kind.replace('_', ' ')} relations", "")
        for kind in ("1_to_1", "1_to_n", "n_to_1", "n_to_n")
    },
    "hits": Figure("reads served from the cache (rows)", "cache"),
    "stale": Figure("reads that found a row too old (rows)", "cache"),
    "misses": Figure("reads of rows not in the cache (rows)", "cache"),
    "validated": Figure("clocks requested from owners", "cache"),
    "evicted": Figure("rows evicted from the cache", "cache"),
    "pushed": Figure("sums of gradients sent to owners", "traffic"),
    "lags": Figure("reads by staleness: 0, 1, 2\N{EN DASH}3, 4\N{EN DASH}7, ... iterations", "cache"),
    "wait_ms": Figure("waiting for rows and gradients (ms per step)", "time"),
    "own_ms_min": Figure("own work, minimum over ranks (ms per step)", "time"),
    "own_ms": Figure("own work, mean over ranks (ms per step)", "time"),
    "own_ms_max": Figure("own work, maximum over ranks (ms per step)", "time"),
    "slowest_rank": Figure("rank with the most own work", "time"),
    **{f"{part}_ms": Figure(f"{part}: {duty} (ms per step)", "time") for part, duty in PARTS.items()},
    "ids_admitted": Figure("ids with a row of their own", "vocabulary", "{:,.0f}".format, "ids"),
    "ids_waiting": Figure("ids waiting for a row", "vocabulary", "{:,.0f}".format, "waiting"),
    "ids_evicted": Figure("ids that lost their row to another, this run", "vocabulary", "{:,.0f}".format, "evicted"),
    "ids_expired": Figure("ids that lost their row, not seen for long, this run", "vocabulary", "{:,.0f}".format),
    "ids_bytes": Figure("memory of ids, all ranks", "vocabulary", bytes_text),
    "file": Figure("file of the stream", ""),
    "step": Figure("step", "progress"),
    "samples": Figure("samples of the stream so far", "progress"),
    "elapsed_s": Figure("seconds of training so far", "progress"),
    "moved_so_far": Figure("bytes between ranks so far", "progress", bytes_text),
    "lr": Figure("learning rate of the dense layers", "progress"),
    "seconds": Figure("seconds of training", "speed", "{:,.1f} s".format),
    "model": Figure("model", ""),
    "data": Figure("data", ""),
    "world_size": Figure("ranks", ""),
    "device": Figure("device", ""),
    "exchange": Figure("exchange of rows between nodes", ""),
    "look_ahead": Figure("whether rows were requested before their step", ""),
    "batches_per_pull": Figure("batches whose rows one message between nodes requests (s >= 1)", ""),
    "dense_exchange": Figure("what sums the dense gradients", ""),
    "steps": Figure("steps", ""),
    "first_step": Figure("steps made before the run was resumed", ""),
    "is_one_node": Figure("all ranks on one node", ""),
    "num_rows": Figure("rows of the tables", ""),
    "row_dim": Figure("numbers per row", ""),
    "dense_parameters": Figure("parameters of the dense layers", ""),
    "checkpoint": Figure("last checkpoint", ""),
    "best_metric": Figure("metric of the best evaluation", ""),
    "best_step": Figure("step of the best evaluation", ""),
    "best_checkpoint": Figure("best checkpoint", ""),
    "ended_early": Figure("reason to end early", ""),
}


def figure_of(key: str) -> Figure:
    """The figure stored under `key`. A key that is not in FIGURES is a metric of the task, with the key as its name, or
    as best_KEY its best value over the evaluations."""
    if key not in FIGURES and key.removeprefix("best_") in FIGURES:
        figure = FIGURES[key.removeprefix("best_")]
        return replace(figure, name=f"best {figure.name}", word=None)
    if key not in FIGURES and key.removeprefix("progressive_") in FIGURES:
        figure = FIGURES[key.removeprefix("progressive_")]
        word = figure.word and f"progressive {figure.word}"
        return replace(figure, name=f"{figure.name}, of files before they were trained on", word=word)
    return FIGURES.get(key) or Figure(key.replace("_", " "), "quality", "{:.4g}".format, key.replace("_", " "))


def is_of_task(key: str, value) -> bool:
    """Whether this entry of a summary or an evaluation measures the model's quality on held-out data."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and figure_of(key).group == "quality" and key != "loss" and key not in EARLIER


def value_text(key: str, value) -> str:
    """A value formatted for display; '-' for None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(f"{item:,}" if isinstance(item, numbers.Integral) else str(item) for item in value)
    return figure_of(key).text(value) if isinstance(value, numbers.Real) else str(value)


def shown(values: dict) -> list[str]:
    """The values that a log line displays, each with its label: those in FIGURES in their order, then the task's."""
    keys = [key for key in FIGURES if key in values]
    keys += [key for key, value in values.items() if key not in FIGURES and isinstance(value, numbers.Real)]
    words = [(figure_of(key).word, key) for key in keys if values[key] is not None]
    return [f"{word} {value_text(key, values[key])}".strip() for word, key in words if word is not None]


def moved_bytes(values: dict) -> float | None:
    """Bytes between ranks of a step or a run; None if they are not counted."""
    found = [values[key] for key in MOVED if values.get(key) is not None]
    return sum(found) if found else None


def moved_per_step(summary: dict) -> float | None:
    """Bytes between ranks per step of a finished run; None if it made no step or did not count bytes."""
    num_steps = summary["steps"] - (summary.get("first_step") or 0)
    moved = moved_bytes(summary)
    return None if moved is None or num_steps <= 0 else moved / num_steps
