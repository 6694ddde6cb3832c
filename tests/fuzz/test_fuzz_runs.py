"""`hetmpi report` of run folders with random damage."""

import base64
import copy
import gzip
import json

from fuzz import fuzz
from mutations import replace_by_no_file

from hetmpi.report import write_report
from hetmpi.spans import PARTS

LINE = {
    "step": 10,
    "samples": 640,
    "elapsed_s": 1.5,
    "loss": 0.7,
    "step_ms": 3.0,
    "samples_per_s": 400.0,
    "hit_rate": 0.9,
    "stale_rate": 0.1,
    "pulled_bytes": 1200.0,
    "pushed_bytes": 800.0,
    "reduced_bytes": None,
    "clock_bytes": 5.0,
    "row_bytes": 9.0,
    "lag_p50": 1,
    "lag_p99": 3,
    "lags": [5, 3, 2],
    "own_ms_min": 2.0,
    "own_ms": 2.5,
    "own_ms_max": 3.0,
    "slowest_rank": 1,
    **{f"{part}_ms": 0.5 for part in PARTS},
}
EVALUATION = {"step": 10, "samples": 640, "elapsed_s": 1.6, "auc": 0.7, "log_loss": 0.5}
SUMMARY = {
    "model": "wdl",
    "world_size": 2,
    "steps": 40,
    "first_step": 0,
    "samples_per_s": 400.0,
    "auc": 0.7,
    "seconds": 3.2,
    "pulled_bytes": 1_200_000,
    "row_bytes": 5,
    "pushed_bytes": 9,
    "hit_rate": 0.9,
    "slowest_rank": 1,
    "best_auc": 0.8,
    "checkpoint": "c",
    "by_rank": [{"host": "near", "own_ms": 2.0}, {"host": "far", "own_ms": 3.0}],
}
ENVIRONMENT = {"commit": "abc", "is_modified": True, "ranks_by_host": {"near": 2}, "device": "cpu", "started": "now"}
STATUS = {"state": "running", "time": 1.7e9, "host": "near", "pid": 5, "process_start": 7, "message": "x", "step": 3}
CACHE = {"capacity_rows": None, "capacity_fraction": 0.1, "policy": "lfu", "admit": "all"}
SETTINGS = {
    "steps": 40,
    "resume": None,
    "run": {"dir": "a"},
    "model_name": "wdl",
    "data_name": "synthetic",
    "table": {"staleness": 10, "ranks_per_node": 2, "cache": CACHE},
    "model": {"hidden": [64, 64], "_target_": "x.Y"},
}
ODD = [
    None,
    True,
    0,
    -1,
    1,
    10,
    1 << 40,
    -(10**30),
    10**120,
    1e-300,
    1e99,
    1e308,
    float("nan"),
    float("inf"),
    0.5,
    "",
    "x",
    "<b>",
    "</script>",
    "\u2028\n\r\0\x1b",
    "\ud800",
    "$title ${a} %s {0}",
    "9" * 5000,
    "x" * 100_000,
    [],
    {},
    [0],
    [[]],
    [None],
    [1e300] * 3,
    ["a"],
    [{"host": "a", "own_ms": None}],
    {"a": {"b": [1, {}]}},
    {"": 1},
    [0] * 70,
    "2020-01-01",
]
TEXTS = [
    b"",
    b"\n",
    b"\0",
    b"{",
    b"[",
    b"null",
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"1" * 400,
    b"&a [*a, *a]",
    b"a: &a [x]\nb: [*a]",
    b"!!python/name:os.system",
    b"? {a: 1}\n: 2",
    b"<<: 5",
    b"a: b: c",
    b"%YAML 9",
    b"a: 2020-13-45",
    b"- " * 3000,
    b"'",
    b"a: !!float x",
    b"---\n---\n",
    b"1:" * 2000,
    b"x: " + b"7:" * 2000 + b"7",
    b"0x" + b"f" * 9000,
    b"1e400",
    b"-Infinity",
    b'{"step": 1}\r\n',
    b'{"step": 1}{"step": 2}\n',
    b"\xe2\x80\xa8\n",
]


def case(rng, folder):
    runs = [
        folder / name for name in rng.sample(["a", "b", "10", "\u00b2", "x\ny", "<b>&", "\udcff"], rng.randint(1, 3))
    ]
    for run in runs:
        run.mkdir()
        write_run(rng, run)
    chosen = [folder] if rng.random() < 0.3 else runs
    out = rng.choice([folder, runs[0]]) / "report.html"
    text = write_report(chosen, out).read_text()
    figures = text.split('id="figures">')[1].split("</script>")[0]
    figures = gzip.decompress(base64.b64decode(figures))
    json.loads(figures, parse_constant=lambda name: 1 / 0)  # the page reads it with JSON.parse


def write_run(rng, run):
    steps = sorted(rng.randint(0, 50) for _ in range(rng.choice([0, 1, 2, 5, 30])))
    lines = [{**LINE, "step": step, "loss": rng.random()} for step in steps]
    evaluations = [{**EVALUATION, "step": step} for step in steps[::3]]
    files = {
        "config.yaml": SETTINGS,
        "metrics.jsonl": lines,
        "evaluation.jsonl": evaluations,
        "summary.json": SUMMARY,
        "environment.json": ENVIRONMENT,
        "status.json": STATUS,
    }
    files = copy.deepcopy(files)
    for name in rng.sample(list(files)[1:], rng.randint(0, 3)):
        del files[name]
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        change(rng, rng.choice(list(files.values())))
    for name, value in files.items():
        lines = value if isinstance(value, list) else [value]
        (run / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), errors="surrogatepass")
    if rng.random() < 0.5:
        damage(rng, run / rng.choice(list(files)))
    if rng.random() < 0.1:
        (run / "report.html").symlink_to(rng.choice(["/dev/null", "nowhere", "config.yaml", "."]))


def change(rng, value):
    """Replaces, adds or removes a value anywhere within."""
    while value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        if isinstance(value, dict) and rng.random() < 0.3:
            key = rng.choice(
                ["new", "lags", "steps", "auc", "best_x", "", "\u2028", "by_rank", "first_step", "_target_"]
            )
        value[key] = rng.choice(ODD)
        return


def damage(rng, path):
    """Other bytes in a file, or something else in its place."""
    data = bytearray(path.read_bytes())
    kind = rng.randint(0, 5)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        data = data[: rng.randint(0, len(data))]
    elif kind == 2:
        place = rng.randint(0, len(data))
        data[place:place] = rng.choice(TEXTS)
    elif kind == 3:
        data = rng.choice(TEXTS)
    else:
        return replace_by_no_file(rng, path)
    path.write_bytes(data)


def test_a_report_of_any_run_folder_is_right_or_refused_in_one_line(tmp_path):
    fuzz(__file__, tmp_path)
