"""Training with rows on disk (table.store=file) against the same table in memory, when every row has been updated.

    ./run.sh bench store [model=wdl] [dim=40] [scale=1.0] [ranks=2] [memory_gb=0.7] [limit_gb=2.0] [steps=600]
                         [batch=128] [s=0] [partition=round_robin,hash] [repeats=1] [folder=/tmp]

A model on Criteo's shape, ids by Zipf's law. With round_robin popular rows are neighbours in a shard, with hash they
are spread over all pages. memory_gb: table.store_memory_gb. limit_gb: of the control group that the ranks on disk run
in, where this process may make one (control groups version 1, as root); 0 for none. Stores take turns. First the disk
itself: random reads of 4 KB by 1 and by 32 threads of preadv, without the system's cache. Last, that losses are the
same.

Last, one JSON line: {"samples_per_s": {partition: {store: [x, ...]}}, "ratio": {partition: x}, "disk": {...: per step
and rank}, "peak_gb": of the group, "reads_per_s": {threads: x}, "settings": {...}}.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from workload import mpiexec, naps, parse

SETTINGS = {
    "model": "wdl", "dim": 40, "scale": 1.0, "ranks": 2, "memory_gb": 0.7, "limit_gb": 2.0, "steps": 600, "batch": 128,
    "s": 0, "partition": ["round_robin", "hash"], "repeats": 1, "folder": "/tmp",
}  # fmt: skip
STORES = "memory", "file"
FIGURES = "disk_wait_rate", "pages_read", "pages_written", "hit_rate"
GROUP = Path("/sys/fs/cgroup/memory/hetmpi_bench_store")
CHUNK = 1 << 16  # rows
PAGE, TEST_BYTES, TEST_S = 4096, 4 << 30, 3.0


def main():
    if "BENCH_STORE_TRAINS" in os.environ:
        return train()
    settings = parse("store", SETTINGS, sys.argv[1:])
    folder = Path(tempfile.mkdtemp(prefix="hetmpi-bench-", dir=settings["folder"]))
    try:
        reads = {threads: reads_per_s(folder / "reads", threads) for threads in (1, 32)}
        print("disk: " + ", ".join(f"{rate:,.0f} reads/s by {threads}" for threads, rate in reads.items()), flush=True)
        (folder / "reads").unlink()
        measure(settings, folder, reads)
    finally:
        shutil.rmtree(folder)


def measure(settings: dict, folder: Path, reads: dict[int, float]):
    speeds, disk, losses, peak = {}, {}, {}, 0.0
    for turn in range(settings["repeats"]):
        for partition in settings["partition"]:
            for store in STORES:
                summary, loss, peak_gb = run(settings, folder, partition, store, turn)
                speeds.setdefault(partition, {}).setdefault(store, []).append(summary["samples_per_s"])
                losses.setdefault(partition, set()).add(loss)
                if store == "file":
                    peak = max(peak, peak_gb)
                    disk[partition] = {name: summary.get(name) for name in FIGURES}
                print(f"{partition:>12} {store:>7} {summary['samples_per_s']:>9,.0f} samples/s, loss {loss}, "
                      f"{disk[partition] if store == 'file' else ''} {peak_gb:.2f} GB", flush=True)  # fmt: skip
    if settings["s"] == 0 and any(len(found) > 1 for found in losses.values()):
        sys.exit(f"bench store: losses differ: {losses}")
    ratio = {
        partition: statistics.median(of["file"]) / statistics.median(of["memory"]) for partition, of in speeds.items()
    }
    print(json.dumps({"samples_per_s": speeds, "ratio": ratio, "disk": disk, "peak_gb": peak, "reads_per_s": reads,
                      "settings": settings}))  # fmt: skip


def run(settings: dict, folder: Path, partition: str, store: str, turn: int) -> tuple[dict, float, float]:
    """The summary of a run, its last loss, and the peak of its group's memory in GB, 0 without one."""
    place = folder / f"{partition}-{store}-{turn}"
    arguments = [
        f"model={settings['model']}", f"data.scale={settings['scale']}", f"table.dim={settings['dim']}",
        f"steps={settings['steps']}",
        f"batch_size={settings['batch']}", f"table.staleness={settings['s']}", f"table.partition={partition}",
        "checkpoint.at_end=false", "eval.max_samples=256", f"run.dir={place}",
    ]  # fmt: skip
    if store == "file":
        arguments += ["table.store=file", f"table.store_dir={folder}", f"table.store_memory_gb={settings['memory_gb']}"]
    limit = settings["limit_gb"] if store == "file" else 0
    command = [*mpiexec(settings["ranks"]), sys.executable, __file__, *arguments]
    environment = {**os.environ, **naps(settings["ranks"]), "BENCH_STORE_TRAINS": "1"}
    group = GROUP if limit and os.access(GROUP.parent, os.W_OK) else None
    if group is not None:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(int(limit * 2**30)))
        (group / "memory.max_usage_in_bytes").write_text("0")

    def enter():
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    if told.returncode != 0:
        sys.exit(f"bench store: the run with {store} failed:\n{told.stdout[-2000:]}")
    peak = 0.0 if group is None else int((group / "memory.max_usage_in_bytes").read_text()) / 1e9
    [*_, last] = (place / "metrics.jsonl").read_text().splitlines()
    return json.loads((place / "summary.json").read_text()), json.loads(last)["loss"], peak


def train():
    """Runs hetmpi.train, whose tables begin with all rows updated: each is assigned its first value."""
    from hetmpi.counters import Counters
    from hetmpi.run import build
    from hetmpi.train import main as train_main
    from hetmpi.world.launch import launch

    make_tables = build.make_tables

    def made(config, *args):
        tables = make_tables(config, *args)
        for table in tables.values():
            for begin, rows in table.scan(CHUNK):
                first = rows.numpy().copy()  # in memory `rows` are the shard's
                table.shard.assign(slice(begin, begin + len(rows)), weight=0)  # not its first value: it takes disk
                table.shard.assign(slice(begin, begin + len(rows)), weight=first)
            if table.shard.file is not None:
                pages = config.table.store_memory_gb * 1e9 / PAGE  # the disk has less to write when training begins
                while table.shard.file.resident_pages > pages:
                    time.sleep(0.1)
                os.sync()
                table.memory.count_pages(Counters())
            table.memory.fence()
        return tables

    build.make_tables = made
    launch(train_main)


def reads_per_s(path: Path, num_threads: int) -> float:
    """Random reads of a page per second, of a file of TEST_BYTES, which is made."""
    if not path.exists():
        with open(path, "wb") as file:
            for _ in range(TEST_BYTES >> 24):
                file.write(os.urandom(1 << 20) * 16)
            os.fsync(file.fileno())
    descriptor, counts = os.open(path, os.O_RDONLY | os.O_DIRECT), [0] * num_threads
    ends = time.monotonic() + TEST_S

    def read(number: int):
        import random

        buffer, draw = mmap.mmap(-1, PAGE), random.Random(number)
        while time.monotonic() < ends:
            os.preadv(descriptor, [buffer], draw.randrange(TEST_BYTES // PAGE) * PAGE)
            counts[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return sum(counts) / TEST_S


if __name__ == "__main__":
    main()
