"""The page of a run: one small training, and run folders written by hand."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from launch import SMALL, run, train

from hetmpi import report
from hetmpi.run import pictures
from hetmpi.spans import PARTS

CURVES = {"Loss", "Loss over time", "AUC", "AUC over time", "Log loss", "Log loss over time", "Samples per second"}
OF_A_CACHE = {"Hit rate", "Stale rate", "Staleness, median", "Staleness, p99", "Staleness of all reads"}
OF_RANKS = {"Own work of the ranks", "Own work, rank by rank"}
OF_BYTES = {"Bytes by kind", "Bytes over samples"}
ALL = CURVES | OF_A_CACHE | OF_RANKS | OF_BYTES | {"Parts of a step"}
VOID = {"meta", "br"}


class Page(HTMLParser):
    """A page taken apart. Raises AssertionError for elements that do not close in order.

    titles of the pictures; rows: first cell of a table's row -> its others; notes: texts of <p>; colours: of lines,
    bars and areas by title of the picture; ids; addresses: of attributes that load something."""

    def __init__(self, text):
        super().__init__()
        self.titles, self.rows, self.notes, self.colours, self.ids, self.addresses = [], {}, [], {}, [], []
        self._open, self._cells = [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        for tags, texts in (({"tr"}, None), ({"th", "td"}, self._cells), ({"h3"}, self.titles), ({"p"}, self.notes)):
            if tag in tags:
                self._cells.clear() if texts is None else texts.append("")

    def handle_startendtag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.addresses += [
            value for name, value in attrs.items() if name in ("src", "href", "xlink:href", "data", "action")
        ]
        if "figure" in self._open and self.titles:
            self.colours.setdefault(self.titles[-1], set()).update(re.findall("#[0-9a-f]{6}", attrs.get("style", "")))

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, (tag, self.getpos())
        if tag == "tr":
            self.rows[self._cells[0]] = self._cells[1:]

    def handle_data(self, text):
        if self._open and not {"svg", "style"} & set(self._open):
            for tags, texts in (({"th", "td"}, self._cells), ({"h3"}, self.titles), ({"p"}, self.notes)):
                if tags & set(self._open):
                    texts[-1] += text


def line(step, **values):
    """A logged step of two ranks with a cache, as the trainer writes it."""
    parts = {f"{part}_ms": 0.5 + place / 10 for place, part in enumerate(PARTS)}
    return {
        "step": step,
        "samples": 128 * step,
        "elapsed_s": 0.01 * step,
        "loss": 0.7 - 0.0001 * step,
        "step_ms": 10.0,
        "samples_per_s": 12_800.0,
        "hit_rate": 0.9,
        "stale_rate": 0.02,
        "pulled_bytes": 1200.0,
        "pushed_bytes": 800.0,
        "clock_bytes": 200.0,
        "row_bytes": 1000.0,
        "reduced_bytes": None,
        "lag_p50": 1,
        "lag_p99": 3,
        "lags": [5, 3, 2],
        "own_ms_min": 2.0,
        "own_ms": 2.5,
        "own_ms_max": 3.0,
        "slowest_rank": 1,
        **parts,
        **values,
    }


WITHOUT_CACHE = {key: None for key in ("hit_rate", "stale_rate", "lag_p50", "lag_p99", "lags")}
SUMMARY = {
    "model": "wdl",
    "steps": 40,
    "samples_per_s": 12_345.0,
    "auc": 0.7654,
    "log_loss": 0.4321,
    "seconds": 3.2,
    "pulled_bytes": 1_234_567,
    "row_bytes": 1_000_000,
    "clock_bytes": 234_567,
    "pushed_bytes": 800_000,
    "slowest_rank": 1,
    "by_rank": [{"host": "near", "own_ms": 2.0}, {"host": "far", "own_ms": 3.0}],
}


@pytest.fixture
def write(tmp_path):
    """Writes a run folder and returns it: write("a", lines=[...], evaluations=[...], summary={...}, **settings)."""

    def write(name, lines=tuple(map(line, range(10, 41, 10))), evaluations=(20, 40), summary=SUMMARY, **changed):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        settings = {
            "steps": 40,
            "resume": None,
            "table": {"staleness": 10, "cache": {"admit": "all"}},
            "run": {"dir": str(folder)},
            **changed,
        }
        (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
        told = [
            {"step": s, "samples": 128 * s, "elapsed_s": s / 100, "auc": 0.7 + s / 1000, "log_loss": 0.5}
            for s in evaluations
        ]
        for file, values in (("metrics.jsonl", lines), ("evaluation.jsonl", told)):
            if values:
                (folder / file).write_text("".join(json.dumps(value) + "\n" for value in values))
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return write


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without what the pictures show, which takes most of the time."""
    monkeypatch.setattr(pictures, "svg", lambda picture, runs, name: f"<svg id='{name}'></svg>")


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
    cached = ["table.staleness=100", "table.cache.admit=all", "table.cache.capacity_fraction=0.5", "eval.every_steps=2"]
    outcome = train(2, *SMALL, *cached, f"run.dir={folder}")
    assert outcome.code == 0, outcome.text
    return folder


def test_the_page_of_a_training_has_every_picture_and_its_figures(trained):
    report.main([str(trained)])
    page = Page((trained / "report.html").read_text())
    found = json.loads((trained / "summary.json").read_text())
    assert set(page.titles) == ALL | {f"A step of {trained.name}"}
    assert page.rows["auc"] == [f"{found['auc']:.4f}"] and page.rows["world_size"] == ["2"]
    assert page.rows["table.cache.capacity_fraction"] == ["0.5"]  # all settings of a run alone
    assert notes(page, f"ended after 6 steps, AUC {found['auc']:.4f}") and not notes(page, "Left out")


def test_the_trainer_logs_how_far_it_is_and_how_uneven_its_ranks_are(trained):
    lines = [json.loads(text) for text in (trained / "metrics.jsonl").read_text().splitlines()]
    told = [json.loads(text) for text in (trained / "evaluation.jsonl").read_text().splitlines()]
    assert [values["samples"] for values in lines] == [values["samples"] for values in told] == [128, 256, 384]
    seconds = [values["elapsed_s"] for pair in zip(lines, told) for values in pair]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert seconds[-1] == pytest.approx(json.loads((trained / "summary.json").read_text())["seconds"])
    for values in lines:
        assert 0 < values["own_ms_min"] <= values["own_ms"] <= values["own_ms_max"] and values["slowest_rank"] in (0, 1)
        assert values["own_ms"] == pytest.approx((values["own_ms_min"] + values["own_ms_max"]) / 2)
        assert values["own_ms"] == pytest.approx(
            sum(values[f"{part}_ms"] for part in ("load", "find", "forward", "backward"))
        )


def test_what_is_pushed_for_an_evaluation_is_in_the_line_after_it(trained):
    pushed = [json.loads(text)["pushed"] for text in (trained / "metrics.jsonl").read_text().splitlines()]
    assert pushed[0] == 0 < pushed[1]  # two steps are fewer than the bound
    assert (
        sum(2 * count for count in pushed) < json.loads((trained / "summary.json").read_text())["pushed"]
    )  # the last flush


def test_the_summary_has_the_parts_of_a_step_of_each_rank(trained):
    found = json.loads((trained / "summary.json").read_text())
    assert len(found["by_rank"]) == 2 and all(rank["host"] for rank in found["by_rank"])
    for part in PARTS:
        assert np.mean([rank[f"{part}_ms"] for rank in found["by_rank"]]) == pytest.approx(found[f"{part}_ms"])
    own = [rank["own_ms"] for rank in found["by_rank"]]
    assert (min(own), max(own), own.index(max(own))) == (
        found["own_ms_min"],
        found["own_ms_max"],
        found["slowest_rank"],
    )


@pytest.mark.long
def test_a_run_goes_on_in_time_where_it_was_left(tmp_path):
    saving = ["checkpoint.every_steps=2", "resume=auto", "log.every_steps=2", f"run.dir={tmp_path}"]
    for steps in (4, 6):
        outcome = train(2, *SMALL, *saving, f"steps={steps}")
        assert outcome.code == 0, outcome.text
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = [values["elapsed_s"] for values in lines]
    assert [values["samples"] for values in lines] == [128, 256, 384] and seconds == sorted(seconds)
    assert (
        seconds[-1] > json.loads((tmp_path / "summary.json").read_text())["seconds"]
    )  # which is of the last part alone
    page, _ = page_of(tmp_path)
    assert notes(page, "ended after 6 steps", f"resumed from {tmp_path}/checkpoints/step-00000004")


def test_a_page_loads_nothing_and_has_no_id_twice(write):
    page, text = page_of(write("a"), write("b"))
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert len(page.ids) == len(set(page.ids)) > 100
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert (
        set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids) and "<script" not in text and "@import" not in text
    )
    assert "://" not in re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)


def test_words_in_pictures_are_text(write):
    _, text = page_of(write("a"))
    assert all(f">{word}</text>" in text for word in ("held-out AUC", "thousand samples", "seconds of training"))


def test_runs_stand_side_by_side_with_the_settings_that_differ(undrawn, write):
    other = write(
        "b", table={"staleness": None, "cache": {"admit": "all"}}, seed=3, summary={**SUMMARY, "auc": 0.7, "extra": 7}
    )
    page, _ = page_of(write("a"), other)
    assert set(page.titles) == ALL | {"A step of a", "A step of b"}
    assert (
        page.rows["auc"] == ["0.7654", "0.7000"]
        and page.rows["pulled_bytes"] == ["1.2 MB", "1.2 MB"]
        and page.rows["extra"] == ["-", "7"]
    )
    assert page.rows["table.staleness"] == ["10", "null"] and page.rows["seed"] == ["-", "3"]
    assert not {"table.cache.admit", "run.dir"} & set(page.rows)
    assert page.rows["slowest_rank"] == ["rank 1 on far, in 100% of the lines"] * 2


def test_every_run_is_in_every_picture_in_its_own_colour(write):
    page, _ = page_of(*(write(name) for name in "abcdef"))
    for title in ALL:
        assert set(pictures.COLOURS) <= page.colours[title], title


def test_runs_of_one_name_are_told_apart_by_their_paths(undrawn, write):
    one, other = write("x/same"), write("y/same")
    page, _ = page_of(one, other)
    assert {f"A step of {one}", f"A step of {other}"} <= set(page.titles)


def test_whatever_a_run_is_called_it_is_text(write):
    folder = write('<b>$x$ & "y"', data={"path": "<script>alert(1)</script>"})
    page, text = page_of(folder, write("plain"))
    assert 'A step of <b>$x$ & "y"' in page.titles and page.rows["data.path"] == ["<script>alert(1)</script>", "-"]
    assert "<b>" not in text and "<script" not in text


def test_a_run_without_a_cache_says_so_in_one_line(undrawn, write):
    page, _ = page_of(write("a", lines=[line(step, **WITHOUT_CACHE) for step in (10, 20)]))
    assert not OF_A_CACHE & set(page.titles) and set(page.titles) >= ALL - OF_A_CACHE
    assert (
        len(notes(page, "Left out: Hit rate, Stale rate", "no rows were read from a cache"))
        == len(notes(page, "Left out"))
        == 1
    )


def test_a_picture_names_the_runs_it_lacks(undrawn, write):
    page, text = page_of(write("a"), write("b", lines=[line(step, **WITHOUT_CACHE) for step in (10, 20)]))
    assert set(page.titles) >= ALL and text.count("Without b: no rows were read from a cache") == len(OF_A_CACHE)


def test_one_rank_has_no_bytes_and_no_uneven_ranks(undrawn, write):
    alone = {
        "pulled_bytes": 0.0,
        "pushed_bytes": 0.0,
        "clock_bytes": 0.0,
        "row_bytes": 0.0,
        "own_ms_min": 2.5,
        "own_ms_max": 2.5,
        "slowest_rank": 0,
    }
    none = {"row_bytes": 0, "clock_bytes": 0, "pushed_bytes": 0, "by_rank": SUMMARY["by_rank"][:1]}
    page, _ = page_of(write("a", lines=[line(step, **alone) for step in (10, 20)], summary={**SUMMARY, **none}))
    assert not (OF_RANKS | OF_BYTES) & set(page.titles)
    assert notes(page, "no bytes cross between ranks") and notes(page, "one rank alone waits for none")


def test_a_run_that_goes_on_still_shows_what_there_is(undrawn, write):
    folder = write("a", evaluations=(), summary=None)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "lo')  # cut short
    page, _ = page_of(folder)
    assert notes(
        page, "not ended: still going, failed or stopped; logged last at step 40, 0 s ago; there is no evaluation yet"
    )
    assert notes(page, "Left out: AUC, AUC over time, Log loss, Log loss over time: there is no evaluation yet.")
    assert {"Loss", "Samples per second", "Parts of a step"} <= set(
        page.titles
    ) and "Own work, rank by rank" not in page.titles


def test_a_run_that_has_logged_nothing_yet_has_a_page(write):
    page, _ = page_of(write("a", lines=(), evaluations=(), summary=None))
    assert (
        page.titles == []
        and notes(page, "logged last never")
        and notes(page, "Left out: Loss", "no step is logged yet")
    )


@pytest.mark.parametrize("count", [1, 2, 10_000])
def test_few_lines_and_many_make_a_page(write, count):
    page, text = page_of(write("a", lines=[line(step) for step in range(1, count + 1)]))
    assert set(page.titles) >= ALL and len(text) < 600_000
    assert ("A step of a" in page.titles) == (count > 1)


def test_what_is_thinned_keeps_its_mean():
    table = np.random.default_rng(0).normal(size=(1200, 3))
    thin = pictures.thinned(table)
    assert (
        thin.shape == (400, 3)
        and np.allclose(thin[7], table[21:24].mean(0))
        and np.allclose(thin.mean(0), table.mean(0))
    )
    assert pictures.thinned(table[:400]) is not None and len(pictures.thinned(table[:401])) == 400


def test_bytes_by_kind_are_those_of_the_steps_since_the_run_was_resumed(write):
    whole = {
        **SUMMARY,
        "steps": 40,
        "first_step": 30,
        "row_bytes": 5000,
        "clock_bytes": 0,
        "pushed_bytes": 20,
        "reduced_bytes": None,
    }
    ended, going = (report.Run(write(name, summary=summary), name, 0) for name, summary in (("a", whole), ("b", None)))
    assert pictures.bytes_by_kind(ended) == {"rows": 500, "clocks": 0, "pushed": 2}
    assert pictures.bytes_by_kind(going) == {"rows": 1000, "clocks": 200, "pushed": 800}


def test_late_reads_are_counted_over_all_lines(write):
    folder = write("a", lines=[line(1, lags=[1, 0, 0, 1]), line(2, lags=[2]), line(3, lags=None)])
    assert pictures.lag_shares(report.Run(folder, "a", 0)) == {"0": 75, "1": 0, "2–3": 0, "4–7": 25}


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
        ("summary.json", "[]", "summary.json is no summary of a run"),
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
    refusal = (
        f"hetmpi: {tmp_path} is no run folder, as it has no config.yaml: name one that hetmpi.train wrote (run.dir)\n"
    )
    assert (outcome.code, outcome.text) == (1, refusal)


def test_a_page_that_cannot_be_written_is_refused(undrawn, write, tmp_path):
    with pytest.raises(
        SystemExit,
        match="hetmpi: cannot write .*/none/x.html: No such file or directory: choose another place by out=FILE",
    ):
        report.main([str(write("a")), f"out={tmp_path}/none/x.html"])


def test_several_runs_are_written_where_one_stands(write, tmp_path, monkeypatch, capsys, undrawn):
    folders = [str(write("a")), str(write("b"))]
    monkeypatch.chdir(tmp_path)
    report.main(folders)
    assert (tmp_path / "report.html").exists() and capsys.readouterr().out == "wrote report.html\n"
