"""Preparing files: processor time and seconds, of this checkout and, in turns, of another one.

    ./run.sh bench prepare [rows=300000] [kinds=text,files,parquet,graph] [repeats=3] [against=] [folder=/tmp]

text: one CSV of a label, 14 columns of texts, 13 of integers and 13 of fractions. files: the same rows, a fifth of
them, in 200 files. parquet: the rows of text in one file. graph: nodes.csv and edges.csv, a tenth of the rows being
nodes with 16 numbers each, four edges each. against: the folder of another checkout, its core compiled.

Last, one JSON line: {"cpu_s": {kind: {checkout: [x, ...]}}, "ratio": {kind: medians, this by the other}, "settings":
{...}}.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from workload import parse

SETTINGS = {
    "rows": 300_000, "kinds": ["text", "files", "parquet", "graph"], "repeats": 3, "against": "", "folder": "/tmp",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
NUM_FILES, NUM_TEXTS, NUM_INTEGERS, NUM_FRACTIONS, DEGREE, NUM_NUMBERS = 200, 14, 13, 13, 4, 16


def main():
    if "BENCH_PREPARE_KIND" in os.environ:
        return prepare(os.environ["BENCH_PREPARE_KIND"], Path(sys.argv[1]))
    settings = parse("prepare", SETTINGS, sys.argv[1:])
    checkouts = {"this": ROOT} | ({"other": Path(settings["against"]).resolve()} if settings["against"] else {})
    folder = Path(tempfile.mkdtemp(prefix="hetmpi-bench-", dir=settings["folder"]))
    try:
        times = {kind: measure(kind, folder / kind, settings, checkouts) for kind in settings["kinds"]}
    finally:
        shutil.rmtree(folder)
    medians = {kind: {name: statistics.median(cpu) for name, cpu in times[kind].items()} for kind in times}
    ratio = {kind: of["this"] / of["other"] for kind, of in medians.items() if "other" in of}
    print(json.dumps({"cpu_s": times, "ratio": ratio, "settings": settings}))


def measure(kind: str, folder: Path, settings: dict, checkouts: dict[str, Path]) -> dict[str, list[float]]:
    """Checkout -> processor seconds of each turn."""
    folder.mkdir()
    write(kind, folder, settings["rows"])
    times = {name: [] for name in checkouts}
    for _ in range(settings["repeats"]):
        for name, checkout in checkouts.items():
            env = {**os.environ, "PYTHONPATH": str(checkout), "BENCH_PREPARE_KIND": kind}
            done = subprocess.run(
                [sys.executable, __file__, folder], env=env, check=True, capture_output=True, text=True
            )
            spent = json.loads(done.stdout.splitlines()[-1])
            times[name].append(spent["cpu_s"])
            print(f"{kind:<8} {name:<6} {spent['cpu_s']:.2f} s of processor time, {spent['wall_s']:.2f} s", flush=True)
    return times


def prepare(kind: str, folder: Path):
    """Prepares the files once, in this process."""
    from hetmpi.data.graph.files import GraphFiles
    from hetmpi.data.tabular import Tabular

    cache = folder.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    if kind == "graph":
        source = GraphFiles(str(folder), 0, train_per_class=100, valid_per_class=100, cache=str(cache))
    else:
        source = Tabular(str(folder), 0, "label", cache=str(cache))
    wall, cpu = time.perf_counter(), time.process_time()
    source.prepare(0, 1, lambda: None, lambda line: None)
    print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}))


def write(kind: str, folder: Path, num_rows: int):
    if kind == "graph":
        return write_graph(folder, num_rows // 10)
    table = table_of(num_rows if kind != "files" else num_rows // 5)
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet")
    elif kind == "text":
        csv.write_csv(table, folder / "rows.csv")
    else:
        size = len(table) // NUM_FILES
        for i in range(NUM_FILES):
            csv.write_csv(table.slice(i * size, size), folder / f"part-{i:03d}.csv")


def table_of(num_rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    columns = {"label": (rng.random(num_rows) < 0.2).astype(int)}
    for i in range(NUM_TEXTS):
        columns[f"t{i}"] = np.char.add("v", (rng.zipf(1.2, num_rows) % 100_000).astype(str))
    for i in range(NUM_INTEGERS):
        columns[f"i{i}"] = rng.zipf(1.3, num_rows) % 5000
    for i in range(NUM_FRACTIONS):
        columns[f"x{i}"] = rng.normal(size=num_rows).round(4)
    return pa.table(columns)


def write_graph(folder: Path, num_nodes: int):
    rng = np.random.default_rng(0)
    numbers = {f"x{i}": rng.normal(size=num_nodes).round(4) for i in range(NUM_NUMBERS)}
    nodes = {"id": np.arange(num_nodes), "label": rng.integers(5, size=num_nodes), **numbers}
    csv.write_csv(pa.table(nodes), folder / "nodes.csv")
    ends = {name: rng.integers(num_nodes, size=DEGREE * num_nodes) for name in ("src", "dst")}
    csv.write_csv(pa.table(ends), folder / "edges.csv")


if __name__ == "__main__":
    main()
