"""The page of a run: one small training, and run folders written by hand."""

import base64
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as plotly_figures
import pytest
from launch import SMALL, run, summary, train

from hetmpi import report
from hetmpi.errors import UserError
from hetmpi.log import pictures, run_files
from hetmpi.log.figures import bytes_text
from hetmpi.log.headline import comparison
from hetmpi.log.lines import Lines
from hetmpi.log.record import Run, run_folders
from hetmpi.log.status import process_start
from hetmpi.spans import OWN, PARTS

CURVES = {"Loss", "AUC", "Log loss", "Samples per second"}
OF_CLICKS = {"Normalised entropy", "Calibration"}
OF_A_CACHE = {"Hit rate", "Stale rate", "Staleness (median)", "Staleness (p99)", "Staleness of all reads"}
OF_RANKS = {"Own work of the ranks", "Own work, rank by rank"}
OF_BYTES = {"Bytes by kind", "Bytes of a step", "AUC over bytes"}
ALL = CURVES | OF_A_CACHE | OF_RANKS | OF_BYTES | {"Parts of a step"}
VOID = {"meta", "br"}


class Page(HTMLParser):
    """A page taken apart. Raises AssertionError for elements that do not close in order.

    titles of the pictures; rows: first cell of a table's row -> its others, of the table that has it first; best: first
    cell of a row -> places of the marked cells; notes: texts of <p>; ids; addresses: of attributes that load something;
    figures: title -> what plotly draws; library: the plotting library's source."""

    def __init__(self, text):
        super().__init__()
        self.titles, self.rows, self.best, self.notes, self.ids, self.addresses = [], {}, {}, [], [], []
        self.figures, self._open, self._cells, self._best, self._scripts, self._plots = {}, [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open
        self.library, drawn = (gzip.decompress(base64.b64decode(text)).decode() for text in self._scripts[:2])
        drawn = json.loads(drawn, parse_constant=lambda name: pytest.fail(f"JSON.parse refuses {name}"))
        assert list(drawn) == self._plots
        self.figures = dict(zip(self.titles, drawn.values()))

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self._cells, self._best = [], []
        for tags, texts in (({"th", "td"}, self._cells), ({"h3"}, self.titles), ({"p"}, self.notes)):
            if tag in tags:
                texts.append("")

    def handle_startendtag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.addresses += [value for name, value in attrs.items() if name in ("src", "href", "xlink:href", "action")]
        if attrs.get("class") == "plot":
            self._plots.append(attrs["id"])
        if attrs.get("class") == "best":
            self._best.append(len(self._cells) - 1)

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, (tag, self.getpos())
        if tag == "tr" and self._cells[0] not in self.rows:
            self.rows[self._cells[0]], self.best[self._cells[0]] = self._cells[1:], self._best

    def handle_data(self, text):
        if self._open and self._open[-1] == "script":
            self._scripts.append(text)
        elif self._open and not {"svg", "style"} & set(self._open):
            for tags, texts in (({"th", "td"}, self._cells), ({"h3"}, self.titles), ({"p"}, self.notes)):
                if tags & set(self._open):
                    texts[-1] += text


def line(step, **values):
    """A logged step of two ranks with a cache, as the trainer writes it."""
    parts = {f"{part}_ms": 0.5 + place / 10 for place, part in enumerate(PARTS)}
    return {
        "step": step, "samples": 128 * step, "elapsed_s": 0.01 * step, "loss": 0.7 - 0.0001 * step, "step_ms": 10.0,
        "samples_per_s": 12_800.0, "hit_rate": 0.9, "stale_rate": 0.02, "pulled_bytes": 1200.0, "pushed_bytes": 800.0,
        "clock_bytes": 200.0, "row_bytes": 1000.0, "lag_p50": 1, "lag_p99": 3, "lags": [5, 3, 2],
        "own_ms_min": 2.0, "own_ms": 2.5, "own_ms_max": 3.0, "slowest_rank": 1, **parts, **values,
    }  # fmt: skip


WITHOUT_CACHE = {key: None for key in ("hit_rate", "stale_rate", "lag_p50", "lag_p99", "lags")}
SUMMARY = {
    "model": "wdl", "world_size": 2, "steps": 40, "samples_per_s": 12_345.0, "auc": 0.7654, "log_loss": 0.4321,
    "seconds": 3.2, "pulled_bytes": 1_200_000, "row_bytes": 1_000_000, "clock_bytes": 200_000, "pushed_bytes": 800_000,
    "hit_rate": 0.9, "slowest_rank": 1,
    "by_rank": [{"host": "near", "own_ms": 2.0}, {"host": "far", "own_ms": 3.0}],
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Writes a run folder and returns it: write("a", lines=[...], evaluations=[...], summary={...}, **settings)."""

    def write(
        name, lines=tuple(map(line, range(10, 41, 10))), evaluations=(20, 40), summary=SUMMARY, status=None, **changed
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        cache = {"capacity_rows": None, "capacity_fraction": 0.1, "policy": "lfu", "admit": "all"}
        settings = {
            "steps": 40, "resume": None, "table": {"staleness": 10, "cache": cache}, "run": {"dir": str(folder)},
            "model_name": "wdl", "data_name": "synthetic", **changed,
        }  # fmt: skip
        (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
        told = [
            {"step": s, "samples": 128 * s, "elapsed_s": s / 100, "auc": 0.7 + s / 1000, "log_loss": 0.5}
            for s in evaluations
        ]
        for file, values in (("metrics.jsonl", lines), ("evaluation.jsonl", told)):
            if values:
                (folder / file).write_text("".join(json.dumps(value) + "\n" for value in values))
        for file, values in (("summary.json", summary), ("status.json", status)):
            if values:
                (folder / file).write_text(json.dumps(values))
        return folder

    return write


def page_of(*folders):
    """The page that the command writes of these folders, taken apart, and its text."""
    out = folders[0].parent / "page.html"
    report.main([*map(str, folders), f"out={out}"])
    text = out.read_text()
    return Page(text), text


def notes(page, *words):
    """Those of the page's notes that hold all words."""
    return [note for note in page.notes if all(word in note for word in words)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two ranks with a cache."""
    folder = tmp_path_factory.mktemp("trained")
    bound = ["table.staleness=100", "table.drift=0"]  # nothing is pushed before a bound of 100 is reached
    cached = [*bound, "table.cache.admit=all", "table.cache.capacity_fraction=0.5", "eval.every_steps=2"]
    outcome = train(2, *SMALL, *cached, f"run.dir={folder}")
    assert outcome.code == 0, outcome.text
    return folder


def test_the_page_of_a_training_has_every_picture_and_its_figures(trained):
    report.main([str(trained)])
    page = Page((trained / "report.html").read_text())
    found = summary(trained)
    of_step = {"Calibration by tenths", "ROC curve", "Precision over recall"}
    assert set(page.titles) == ALL | OF_CLICKS | of_step | {f"A step of {trained.name}"}
    assert page.rows["AUC on held-out data"] == [f"{found['auc']:.4f}"]
    assert page.rows["ranks"][0].startswith("2 ranks on 1 host (")
    assert page.rows["table.cache.capacity_fraction"] == ["0.5"]  # all settings of a run alone
    assert page.rows["state"] == ["finished after 6 steps"] and not notes(page, "Not shown: A")
    moved = (found["pulled_bytes"] + found["pushed_bytes"]) / 6
    assert page.rows["bytes between ranks per step, all ranks"] == [bytes_text(moved)]
    for title, figure in page.figures.items():
        assert len(plotly_figures.Figure(figure).data) > 0, title  # it raises for what plotly does not know


def test_the_trainer_logs_how_far_it_is_and_how_uneven_its_ranks_are(trained):
    lines = [json.loads(text) for text in (trained / "metrics.jsonl").read_text().splitlines()]
    told = [json.loads(text) for text in (trained / "evaluation.jsonl").read_text().splitlines()]
    assert [values["samples"] for values in lines] == [values["samples"] for values in told] == [128, 256, 384]
    seconds = [values["elapsed_s"] for pair in zip(lines, told) for values in pair]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert seconds[-1] == pytest.approx(summary(trained)["seconds"])
    for values in lines:
        assert 0 < values["own_ms_min"] <= values["own_ms"] <= values["own_ms_max"] and values["slowest_rank"] in (0, 1)
        assert values["own_ms"] == pytest.approx((values["own_ms_min"] + values["own_ms_max"]) / 2)
        assert values["own_ms"] == pytest.approx(sum(values[f"{part}_ms"] for part in OWN))


def test_what_is_pushed_for_an_evaluation_is_in_the_line_after_it(trained):
    pushed = [json.loads(text)["pushed"] for text in (trained / "metrics.jsonl").read_text().splitlines()]
    assert pushed[0] == 0 < pushed[1]  # two steps are fewer than the bound
    assert sum(2 * count for count in pushed) < summary(trained)["pushed"]  # of which the rest came with the last flush


def test_the_summary_has_the_parts_of_a_step_of_each_rank(trained):
    found = summary(trained)
    assert len(found["by_rank"]) == 2 and all(rank["host"] for rank in found["by_rank"])
    for part in PARTS:
        assert np.mean([rank[f"{part}_ms"] for rank in found["by_rank"]]) == pytest.approx(found[f"{part}_ms"])
    own = [rank["own_ms"] for rank in found["by_rank"]]
    assert [min(own), max(own)] == [found["own_ms_min"], found["own_ms_max"]]
    assert own[found["slowest_rank"]] == max(own)


@pytest.mark.long
def test_a_run_goes_on_in_time_where_it_was_left(tmp_path):
    saving = ["checkpoint.every_steps=2", "resume=auto", "log.every_steps=2", f"run.dir={tmp_path}"]
    for steps in (4, 6):
        outcome = train(2, *SMALL, *saving, f"steps={steps}")
        assert outcome.code == 0, outcome.text
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [values["elapsed_s"] for values in lines]
    assert [values["samples"] for values in lines] == [128, 256, 384] and seconds == sorted(seconds)
    assert seconds[-1] > summary(tmp_path)["seconds"]  # which is of the last part alone
    page, _ = page_of(tmp_path)
    assert page.rows["state"] == [f"finished after 6 steps; resumed from {tmp_path}/checkpoints/step-00000004"]


def test_a_page_loads_nothing_and_has_no_id_twice(write):
    page, text = page_of(write("a"), write("b"))
    assert not page.addresses and "@import" not in text and "url(" not in text
    assert len(page.ids) == len(set(page.ids)) > 15


def test_all_pictures_are_of_kinds_that_the_library_draws(write):
    page, _ = page_of(write("a"), write("b"))
    assert {trace["type"] for figure in page.figures.values() for trace in figure["data"]} == {"scatter", "bar"}


def test_a_page_of_several_long_runs_takes_little_more_than_the_library(write):
    draw = np.random.default_rng(0).random

    def noisy(step):
        values = line(step)
        return {key: value * draw() if isinstance(value, float) else value for key, value in values.items()}

    folders = [
        write(name, lines=[noisy(step) for step in range(1, 501)], evaluations=range(5, 501, 5)) for name in "abc"
    ]
    page, text = page_of(*folders)
    assert set(page.titles) >= ALL and len(text.encode()) < 4 / 3 * len(report.library()) + 300_000


def test_a_switch_changes_all_curves_from_samples_to_time(write):
    page, text = page_of(write("a", lines=[line(step) for step in range(1, 31)]), write("b"))
    assert [text.count(f'data-axis="{axis}"') for axis in ("samples", "time")] == [1, 1]
    over_samples = {title for title, figure in page.figures.items() if "sample" in str(figure["layout"]["xaxis"])}
    assert over_samples == {title for title, figure in page.figures.items() if "time" in figure}
    assert over_samples >= CURVES | {"Hit rate", "Bytes of a step", "Own work of the ranks", "A step of a"}
    for title in over_samples:
        figure = page.figures[title]
        assert figure["time"]["title"] == "seconds of training", title
        for trace, seconds in zip(figure["data"], figure["time"]["x"], strict=True):
            samples = [12_800 * second for second in seconds]  # 100 steps of 128 samples per second, as line() says
            assert np.allclose(samples, np.array(trace["x"]) * 1000, rtol=1e-4), title


def test_a_page_without_curves_has_no_switch(write):
    _, text = page_of(write("a", lines=(), evaluations=(), summary=None))
    assert "<nav>" not in text and 'data-axis="' not in text


def drawn_by_chromium(text, folder, script):
    """The page after a browser without network has drawn it and run the script two seconds later."""
    (folder / "page.html").write_text(
        text.replace("</body>", f"<script>setTimeout(() => {script}, 2000)</script></body>")
    )
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=8000 --dump-dom"
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/browser"]
    command = ["chromium", *options.split(), *offline, f"file://{folder}/page.html"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_draws_all_pictures_and_the_switch_redraws_them(write, tmp_path):
    page, text = page_of(write("a"), write("b"))
    click = 'document.querySelector("button[data-axis=time]").click()'
    before, after = (drawn_by_chromium(text, tmp_path, script) for script in ("0", click))
    assert before.count('class="modebar-container"') == after.count('class="modebar-container"') == len(page.titles)
    over = [sum("time" in figure for figure in page.figures.values()), 0]
    for dom, counts in ((before, over), (after, over[::-1])):
        assert [dom.count(f">{title}</text>") for title in ("thousand samples", "seconds of training")] == counts
        assert '<p id="undrawn" hidden' in dom


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_an_old_browser_shows_which_it_needs(write, tmp_path):
    _, text = page_of(write("a"))
    dom = drawn_by_chromium(
        text.replace("<head>", "<head><script>delete window.DecompressionStream</script>"), tmp_path, "0"
    )
    assert '<p id="undrawn">The pictures need JavaScript and Chrome 80' in dom


def first_sentence(*folders):
    page, text = page_of(*folders)
    assert text.split("</h1>\n")[1].startswith('<p class="conclusion">') and page.notes[0].endswith(".")
    return page.notes[0]


def test_the_page_of_a_run_begins_with_what_it_reached(write):
    at = ", at 12,345 samples per second and 391 B between ranks per sample."
    assert first_sentence(write("a")) == f"a reached 0.7654 in AUC on held-out data after 40 steps{at}"
    going = first_sentence(write("b", summary=None))
    at = ", at 12,800 samples per second and 16 B between ranks per sample."
    assert going == f"b has not finished; so far it reached 0.7400 in AUC on held-out data{at}"
    assert first_sentence(write("c", summary=None, lines=(), evaluations=())) == (
        "c has not finished and has no figures yet."
    )


def test_the_page_of_several_runs_begins_with_the_best_of_them(write):
    less = {"pulled_bytes": 200_000, "pushed_bytes": 0}
    a, b = write("a"), write("b", summary={**SUMMARY, **less, "samples_per_s": 20_000.0, "auc": 0.7000})
    assert first_sentence(a, b) == (
        "Of 2 runs, a has the best AUC on held-out data (0.7654, the other 0.7000); b has the most samples per second "
        "(20,000, the other 12,345) and the fewest bytes between ranks per sample (39 B, the other 391 B)."
    )
    c = write("c", summary={**SUMMARY, "auc": 0.76541})
    assert first_sentence(a, b, c).startswith(
        "Of 3 runs, a and c have the best AUC on held-out data (0.7654, the next 0.7000); b has the most samples"
    )
    assert first_sentence(a, c).startswith("Of 2 runs, both have the same AUC on held-out data (0.7654), the same samp")


def test_the_first_sentence_compares_only_runs_that_finished(write):
    a, going = write("a"), write("b", summary=None)
    assert first_sentence(a, going).startswith(
        "Of 2 runs one has finished: a reached 0.7654 in AUC on held-out data af"
    )
    assert first_sentence(going, write("c", summary=None)).startswith("None of the 2 runs has finished: the table ")
    far = write("d", lines=[line(10), line(80)], summary={**SUMMARY, "auc": 0.8})
    assert first_sentence(a, going, far).startswith(
        "Of the 2 finished of 3 runs, which trained on different numbers of samples, d has the best AUC on held-out "
    )


def test_the_first_sentence_leaves_out_figures_that_a_run_lacks(write):
    rated = {key: value for key, value in SUMMARY.items() if key not in ("auc", "log_loss")} | {"rmse": 0.25}
    folders = write("a"), write("b", summary={**rated, "samples_per_s": 20_000.0})
    assert first_sentence(*folders).startswith(
        "Of 2 runs, b has the most samples per second (20,000, the other 12,345)"
    )


def test_axes_and_hover_have_words_and_units(write):
    page, _ = page_of(write("a"))
    layout = page.figures["AUC"]["layout"]
    assert page.figures["AUC"]["time"]["title"] == "seconds of training"
    assert layout["yaxis"]["title"]["text"] == "AUC on held-out data"
    assert layout["xaxis"]["title"]["text"] == "thousand samples"
    assert page.figures["Bytes by kind"]["data"][0]["text"] == ["25.0 kB", "5.0 kB", "20.0 kB"]


def test_the_headline_marks_the_best_of_each_row_and_says_how_far_the_others_are(write):
    other = {**SUMMARY, "auc": 0.7, "log_loss": 0.4, "pulled_bytes": 200_000, "pushed_bytes": 0, "hit_rate": 0.95}
    page, _ = page_of(write("a"), write("b", summary=other), write("c", summary=None))
    assert page.rows["AUC on held-out data"] == ["0.7654 best", "0.7000 \N{MINUS SIGN}0.0654", "0.7400 so far"]
    moved = page.rows["bytes between ranks per step, all ranks"]
    assert moved == ["50.0 kB 10.0 times", "5.0 kB best", "2.0 kB so far"]
    assert page.rows["bytes between ranks per sample"][:2] == ["391 B 10.0 times", "39 B best"]
    assert page.rows["cacheable reads served from the cache"][0] == "90.0% \N{MINUS SIGN}5.0 points"
    assert page.rows["samples per second, all ranks"] == ["12,345", "12,345", "12,800 so far"]
    assert page.best["AUC on held-out data"] == [0] and page.best["log loss on held-out data (nats)"] == [1]
    assert not page.best["samples per second, all ranks"]


def test_the_headline_says_what_ran(write):
    exact = {"staleness": 0, "cache": {"capacity_rows": None, "capacity_fraction": None}}
    page, _ = page_of(write("a"), write("b", table=exact), write("c", summary={**SUMMARY, "hit_rate": None}))
    assert page.rows["model and data"] == ["wdl on synthetic"] * 3 and page.rows["ranks"] == ["2 ranks"] * 3
    assert page.rows["staleness bound"][:2] == ["10 iterations", "0: every read is exact"]
    cache = "0.1 of all rows on each rank, lfu, admits all"
    assert page.rows["cache"] == [cache, "none", f"not used: {cache}"]


def test_runs_stand_side_by_side_with_the_settings_that_differ(write):
    other = write("b", table={"staleness": None, "cache": {"admit": "all"}}, seed=3, summary={**SUMMARY, "extra": 7})
    page, text = page_of(write("a"), other)
    assert set(page.titles) == ALL | {"A step of a", "A step of b"}
    assert page.rows["pulled: rows and clocks fetched from other ranks"] == ["1.2 MB"] * 2
    assert page.rows["rank with the most own work"] == ["rank 1 on far, in 100% of the lines"] * 2
    assert page.rows["extra"] == ["-", "7"]
    assert page.rows["table.staleness"] == ["10", "null"] and page.rows["seed"] == ["-", "3"]
    differing = text[text.index("Settings that differ") : text.index("<nav>")]
    assert "table.staleness" in differing and "run.dir" not in differing and "table.cache.admit" not in differing


def test_every_run_is_in_every_picture_in_its_own_colour(write):
    page, _ = page_of(*(write(name) for name in "abcdefg"))
    expected = {(number, pictures.COLOURS[number % 6]) for number in range(7)}
    for title in ALL:
        styles = [(each["meta"], each.get("marker") or each["line"]) for each in page.figures[title]["data"]]
        assert {(run, style["color"]) for run, style in styles if "color" in style} == expected, title
    assert {each["line"]["dash"] for each in page.figures["AUC"]["data"]} == {"solid", "dash"}


def test_runs_of_one_name_are_told_apart_by_their_paths(write):
    one, other = write("x/same"), write("y/same")
    page, _ = page_of(one, other)
    assert {f"A step of {one}", f"A step of {other}"} <= set(page.titles)


def test_whatever_a_run_is_called_it_is_text(write):
    folder = write('<b>$x$ & "y"', data={"path": "</script><script>alert(1)</script>"})
    page, text = page_of(folder, write("plain"))
    assert 'A step of <b>$x$ & "y"' in page.titles
    assert page.rows["data.path"] == ["</script><script>alert(1)</script>", "-"]
    assert page.figures["AUC"]["data"][0]["name"] == "&lt;b&gt;$x$ &amp; &quot;y&quot;"  # plotly reads <b>
    assert "<b>$x$" not in text and "<script>alert" not in text


def test_a_run_without_a_cache_says_so_in_one_line(write):
    page, _ = page_of(write("a", lines=[line(step, **WITHOUT_CACHE) for step in (10, 20)]))
    assert not OF_A_CACHE & set(page.titles) and set(page.titles) >= ALL - OF_A_CACHE
    [note] = notes(page, "Not shown")
    assert note.startswith("Not shown: Hit rate, Stale rate") and "no rows were read from a cache" in note


def test_a_note_names_the_runs_that_pictures_lack(write):
    page, _ = page_of(write("a"), write("b", lines=[line(step, **WITHOUT_CACHE) for step in (10, 20)]))
    [note] = notes(page, "Not shown for b: Hit rate, Stale rate", "no rows were read from a cache")
    assert set(page.titles) >= ALL and all(title in note for title in OF_A_CACHE)


def test_one_rank_has_no_bytes_and_no_uneven_ranks(write):
    nothing = dict.fromkeys(("pulled_bytes", "pushed_bytes", "clock_bytes", "row_bytes"), 0.0)
    alone = {**nothing, "own_ms_min": 2.5, "own_ms_max": 2.5, "slowest_rank": 0}
    none = {**nothing, "by_rank": SUMMARY["by_rank"][:1]}
    page, _ = page_of(write("a", lines=[line(step, **alone) for step in (10, 20)], summary={**SUMMARY, **none}))
    assert not (OF_RANKS | OF_BYTES) & set(page.titles)
    assert notes(page, "no bytes cross between ranks") and notes(page, "it needs at least two ranks")


def test_a_run_that_goes_on_shows_what_there_is(write):
    folder = write("a", evaluations=(), summary=None, status=running())
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "lo')  # cut short
    page, _ = page_of(folder)
    assert page.rows["state"] == ["running; last logged step 40 of 40, 0 s ago"]
    assert notes(page, "Not shown: AUC, Log loss: no evaluation has measured it.")
    assert {"Loss", "Samples per second", "Parts of a step"} <= set(page.titles)
    assert "Own work, rank by rank" not in page.titles


def test_a_run_that_has_logged_nothing_yet_has_a_page(write):
    page, _ = page_of(write("a", lines=(), evaluations=(), summary=None, status=running(time=time.time())))
    assert page.titles == [] and page.rows["state"] == ["running; no step logged"]
    assert notes(page, "Not shown: Loss", "no step is logged yet")


def running(**changed):
    """status.json of a run whose process is this one."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "process_start": process_start(os.getpid())}
    return {"state": "running", "time": time.time() - 1000, **mine, **changed}


@pytest.mark.parametrize(
    "status, later_s, said",
    [
        (running(), 300, "running, but no line for 5 min, usually every 0.1 s; last logged step 40 of 40, 5 min ago"),
        (running(process_start=1), 5, "probably killed: its process on HOST ended without a message; last"),
        (running(host="far"), 5, "probably running, on far (processes there are not visible from here); last logged"),
        (running(host="far"), 300, "killed or hanging, on far: no line for 5 min, usually every 0.1 s; last logged"),
        (
            {"state": "failed", "message": "Traceback ...\n  x\nhetmpi: OSError: no disk (rank 1 of 2 on far)"}, 5,
            "failed: OSError: no disk (rank 1 of 2 on far); last logged step 40 of 40, 5 s ago",
        ),
        (
            {"state": "stopped", "step": 40, "resume": "c/step-00000040"}, 5,
            "stopped by a signal at step 40, saved; continue with resume=auto",
        ),
        (None, 5, "not finished; state unknown; last logged step 40 of 40, 5 s ago"),
    ],
)  # fmt: skip
def test_a_state_says_what_is_known(write, status, later_s, said):
    folder = write("a", summary=None, status=status)
    written = (folder / "metrics.jsonl").stat().st_mtime
    assert Run(folder, "a", 0).state(written + later_s).startswith(said.replace("HOST", socket.gethostname()))


def test_a_killed_run_that_has_saved_can_go_on(write):
    folder = write("a", summary=None, status=running(process_start=1))
    (folder / "checkpoints/step-00000040").mkdir(parents=True)
    (folder / "checkpoints/step-00000040/manifest.json").touch()
    assert Run(folder, "a", 0).state(time.time()).endswith("continue with resume=auto")


def test_a_folder_of_runs_is_all_of_them_in_natural_order(write, tmp_path):
    for name in ("sweep/10", "sweep/2", "sweep/1"):
        write(name)
    (tmp_path / "sweep/notes").mkdir()
    assert [folder.name for folder in run_folders(tmp_path / "sweep")] == ["1", "2", "10"]
    report.main([str(tmp_path / "sweep")])
    page = Page((tmp_path / "sweep/report.html").read_text())
    assert {"A step of 1", "A step of 2", "A step of 10"} <= set(page.titles)


def test_runs_are_compared_in_plain_text(write):
    other = write("b", table={"staleness": None}, summary={**SUMMARY, "auc": 0.7, "pulled_bytes": 0, "pushed_bytes": 0})
    long = write("c" * 70, table={"staleness": 3}, summary=None, lines=(), evaluations=())
    rows = comparison([write("a", table={"staleness": 0}), other, long]).splitlines()
    assert rows[0].split() == ["run", "AUC", "MB", "per", "step", "samples/s", "settings", "that", "differ"]
    assert rows[1].split() == ["a", "0.7654", "0.05", "12,345", "table.staleness=0"]
    assert rows[2].split() == ["b", "0.7000", "0", "12,345", "table.staleness=null"]
    assert all(len(row) <= 100 for row in rows) and "(not ended)" in " ".join(rows[3:])


def test_no_setting_that_differs_is_cut_off(write):
    many = {f"setting{number}": number for number in range(30)} | {"data": {"path": "p" * 200}}
    rows = comparison([write("a"), write("b", **many)]).splitlines()
    assert all(len(row) <= 100 for row in rows) and rows[-1].split()[0].startswith("p")
    begin = next(place for place, row in enumerate(rows) if row.startswith("b "))
    shown = "".join(row[rows[0].index("settings") :].strip() for row in rows[begin:])
    assert all(f"setting{number}={number}" in shown for number in range(30)) and f"data.path={'p' * 200}" in shown


def test_the_best_value_is_compared_where_a_run_followed_it(write):
    followed = write("a", summary=SUMMARY | {"best_auc": 0.7777, "best_metric": "auc", "best_step": 20})
    rows = comparison([followed, write("b")]).splitlines()
    assert rows[0].split()[:4] == ["run", "AUC", "best", "AUC"] and rows[1].split()[:3] == ["a", "0.7654", "0.7777"]
    assert rows[2].split()[:3] == ["b", "0.7654", "-"]


def test_a_task_s_own_figure_is_compared(write):
    rated = {key: value for key, value in SUMMARY.items() if key not in ("auc", "log_loss")} | {"rmse": 0.25}
    folder = write("a", summary=rated, evaluations=(), data={"_target_": "ratings.Ratings"})
    told = [{"step": step, "samples": 128 * step, "elapsed_s": 1.0, "rmse": 0.25} for step in (20, 40)]
    (folder / "evaluation.jsonl").write_text("".join(f"{json.dumps(values)}\n" for values in told))
    assert comparison([folder]).split()[:2] == ["run", "rmse"]
    page, _ = page_of(folder)
    assert page.rows["model and data"] == ["wdl on ratings.Ratings"]
    assert {"Rmse", "Rmse over bytes"} <= set(page.titles) and not notes(page, "AUC")
    page, _ = page_of(folder, write("b"))
    assert page.rows["rmse"] == ["0.25", "-"] and notes(page, "Not shown for b: Rmse", "no evaluation has measured it")


def test_bytes_so_far_are_those_of_all_steps(write):
    lines = [line(10), line(30, pulled_bytes=200.0)]
    found = Run(write("a", lines=lines, evaluations=(20, 30)), "a", 0)
    assert [values["moved_so_far"] for values in found.evaluations] == [20_000 + 10 * 1000, 20_000 + 20 * 1000]


@pytest.mark.parametrize("count", [1, 2, 10_000])
def test_few_lines_and_many_make_a_page(write, count):
    page, text = page_of(write("a", lines=[line(step) for step in range(1, count + 1)]))
    of_lines = {"Loss", "Samples per second", "Own work of the ranks", "Bytes of a step", *OF_A_CACHE}
    of_lines -= {"Staleness of all reads"}
    assert set(page.titles) >= (ALL if count > 1 else ALL - of_lines) and len(text) < 2_100_000
    assert ("A step of a" in page.titles) == ("Loss" in page.titles) == (count > 1)


CURVES_OF_STEP = {
    "step": 40, "calibration": [[0.1, 0.2, 50], [0.5, 0.4, 50]], "roc": [[0, 0], [0.2, 0.7], [1, 1]],
    "precision": [[0.5, 0.9], [1, 0.5]], "unseen": {"user": [30, 60], "item": [0, 60]},
}  # fmt: skip


def test_a_run_with_curves_has_pictures_of_its_best_evaluation(write):
    folder = write("a")
    (folder / "curves.json").write_text(json.dumps(CURVES_OF_STEP))
    page, _ = page_of(folder, write("b"))
    of_step = {"Calibration by tenths", "ROC curve", "Precision over recall", "Unseen held-out values"}
    assert of_step <= set(page.titles) and notes(page, "Not shown for b: Calibration by tenths, ROC curve, Precision")
    [unseen] = [figure for title, figure in page.figures.items() if title.startswith("Unseen")]
    assert unseen["data"][0]["x"] == ["user", "item"] and unseen["data"][0]["y"] == [50, 0]
    [roc] = [figure for title, figure in page.figures.items() if title.startswith("ROC")]
    assert roc["data"][0]["x"] == [0, 0.2, 1] and roc["data"][0]["y"] == [0, 0.7, 1]
    assert not of_step & set(page_of(write("c"))[0].titles)


def test_what_has_one_point_is_no_picture(write):
    page, _ = page_of(write("a", evaluations=(40,)))
    assert not {"AUC", "Log loss", "AUC over bytes"} & set(page.titles) and "Loss" in page.titles
    assert notes(page, "Not shown: AUC, ", "it was evaluated once (eval.every_steps)")
    page, _ = page_of(write("b", evaluations=(40,)), write("c"))
    assert "AUC" in page.titles and notes(page, "Not shown for b: AUC", "it was evaluated once")


def test_what_is_thinned_keeps_its_mean():
    table = np.random.default_rng(0).normal(size=(1200, 3))
    thin = pictures.thinned(table)
    assert thin.shape == (400, 3) and np.allclose(thin[7], table[21:24].mean(0))
    assert np.allclose(thin.mean(0), table.mean(0))
    assert pictures.thinned(table[:400]) is not None and len(pictures.thinned(table[:401])) == 400


def test_bytes_by_kind_are_those_of_the_steps_since_the_run_was_resumed(write):
    moved = {"row_bytes": 5000, "clock_bytes": 0, "pushed_bytes": 20}
    whole = {**SUMMARY, "steps": 40, "first_step": 30, **moved}
    ended, going = (Run(write(name, summary=summary), name, 0) for name, summary in (("a", whole), ("b", None)))
    assert list(pictures.bytes_by_kind(ended).values()) == [500, 0, 2]
    assert list(pictures.bytes_by_kind(going).values()) == [1000, 200, 800]


def test_100_000_lines_are_read_in_seconds_of_one_processor(write):
    texts = json.dumps(line(7)).partition('"step": 7')
    folder = write("a", lines=[])
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(f'{texts[0]}"step": {step}{texts[2]}\n' for step in range(1, 100_001))
    begin = time.process_time()
    report.main([str(folder)])
    assert time.process_time() - begin < 6  # 1.5 on a quiet machine; line by line 15


@pytest.mark.parametrize("last", [line(1003), line(1003, extra=5), line(1003, file="b", lags=None), {"step": 1003}])
def test_lines_read_as_columns_are_those_read_one_by_one(tmp_path, last):
    lines = [line(step, loss=None if step % 7 == 0 else step / 3, file="a") for step in range(1, 1003)]
    lines = [*lines, line(1002, **WITHOUT_CACHE, auc=1, flag=True), line(1002, lags=[0, 0, 0, 4]), last]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(values) + "\n" for values in lines) + '{"step": 9')
    found, slow = run_files.read_metrics(path), Lines.of(lines)
    assert isinstance(found, Lines) and found.last == last and found.lags.tolist() == slow.lags.tolist()
    for keys in (
        ("step",),
        ("step", "loss"),
        ("hit_rate", "auc"),
        ("extra",),
        ("lr",),
        ("file",),
        ("own_ms", "lag_p99"),
    ):
        assert found.table(keys).tolist() == slow.table(keys).tolist(), keys
    assert found.slowest_ranks() == slow.slowest_ranks()


@pytest.mark.parametrize("wrong", [
    '{"step": -1}', '{"step": 1.5}', '{"step": 1, "loss": "x"}', '{"step": 1, "lags": [-1]}', '{"step": 1, "lags": 3}',
    '{"step": 1, "loss": NaN}', '{"step": 1, "loss": 1e999}', "", "5", '{"a": 1}', '{"step": 1, "a": {}, "loss": []}',
    '{"step": 1, "lags": ' + "[" * 50_000, '{"step": 1, "slowest_rank": -2}', '{"step": 1} {"step": 2}',
])  # fmt: skip
def test_a_wrong_line_among_many_is_named(tmp_path, wrong):
    texts = [json.dumps(line(step)) for step in range(1, 1200)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*texts[:600], wrong, *texts[600:]]) + "\n")
    with pytest.raises(UserError, match="metrics.jsonl, line 601"):
        run_files.read_metrics(path)


def test_late_reads_are_counted_over_all_lines(write):
    folder = write("a", lines=[line(1, lags=[1, 0, 0, 1]), line(2, lags=[2]), line(3, lags=None)])
    assert pictures.lag_shares(Run(folder, "a", 0)) == {"0": 75, "1": 0, "2–3": 0, "4–7": 25}


@pytest.mark.parametrize(
    "file, text, refusal",
    [
        (
            "metrics.jsonl",
            '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n',
            r"metrics.jsonl, line 2 is not JSON \(.*\): remove the line",
        ),
        ("evaluation.jsonl", '{"auc": 1}\n', "evaluation.jsonl, line 1 has no step"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl, line 1 has no step"),
        ("summary.json", '{"steps"', "summary.json is not JSON"),
        ("summary.json", "[]", "summary.json has an unexpected format: remove the file"),
        ("status.json", "[]", "status.json has an unexpected format: remove the file"),
        ("environment.json", "{", "environment.json is not JSON"),
        ("config.yaml", "a: [", "config.yaml is not YAML"),
        ("config.yaml", "a", "config.yaml holds no settings"),
    ],
)
def test_a_damaged_file_is_named(write, file, text, refusal):
    folder = write("a")
    (folder / file).write_text(text)
    with pytest.raises(SystemExit, match=f"^hetmpi: .*{refusal}"):
        report.main([str(folder)])


def test_what_is_no_run_folder_is_refused_without_a_traceback(tmp_path):
    outcome = run([sys.executable, "-m", "hetmpi.report", str(tmp_path)])
    refusal = f"hetmpi: {tmp_path} is not a run folder, as it has no config.yaml: name one that hetmpi.train wrote "
    assert (outcome.code, outcome.text) == (1, f"{refusal}(run.dir), or a folder of such folders\n")


def test_a_page_that_cannot_be_written_is_refused(write, tmp_path):
    with pytest.raises(
        SystemExit,
        match="hetmpi: cannot write .*/none/x.html: No such file or directory: choose another path with out=FILE",
    ):
        report.main([str(write("a")), f"out={tmp_path}/none/x.html"])


def test_several_runs_are_written_where_one_stands(write, tmp_path, monkeypatch, capsys):
    folders = [str(write("a")), str(write("b"))]
    monkeypatch.chdir(tmp_path)
    report.main(folders)
    assert (tmp_path / "report.html").exists() and capsys.readouterr().out == "wrote report.html\n"
