"""Makes one HTML page of one or several runs, with pictures: it needs nothing beside it and loads nothing.

    python -m hetmpi.report RUN [RUN ...] [out=FILE]

RUN is a run folder (run.dir); FILE is RUN/report.html for one run, report.html for several. One process without MPI.
"""

from __future__ import annotations

import json
import numbers
import sys
import time
from collections import Counter
from functools import cache
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from hetmpi.errors import UserError
from hetmpi.run import pictures
from hetmpi.run.runlog import value_text
from hetmpi.spans import PARTS

FOLDED = {
    "by_rank",
    "run_dir",
    *(f"{part}_ms" for part in PARTS),
}  # keys of a summary that pictures show, or the heading


def main(arguments: list[str]):
    """Reads the command line, writes the page, says where."""
    folders = [argument for argument in arguments if not argument.startswith("out=")]
    outs = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    if not folders or len(outs) > 1 or {"-h", "--help"} & set(arguments):
        sys.exit(__doc__)
    default = Path(folders[0]) / "report.html" if len(folders) == 1 else Path("report.html")
    try:
        print(f"wrote {write_report([Path(folder) for folder in folders], Path(outs[0]) if outs else default)}")
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")


def write_report(folders: list[Path], out: Path) -> Path:
    """Writes the page of these run folders to `out`, and returns it. Raises UserError for what is no run folder, a file
    of it that cannot be read, and where the page cannot be written."""
    repeated = Counter(folder.resolve().name for folder in folders)
    names = [str(folder) if repeated[folder.resolve().name] > 1 else folder.resolve().name for folder in folders]
    text = page([Run(folder, name, number) for number, (folder, name) in enumerate(zip(folders, names))])
    try:
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}: choose another place by out=FILE") from error
    return out


class Run:
    """What a run folder says.

    name, number      what it is called, and its place among the runs of the page
    settings          key -> value, as on the command line
    lines, evaluations  of metrics.jsonl and evaluation.jsonl; one that was cut short at the end is left out
    summary           {} until the run has ended
    """

    def __init__(self, folder: Path, name: str, number: int):
        if not (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder} is no run folder, as it has no config.yaml: name one that hetmpi.train wrote (run.dir)"
            )
        self.folder, self.name, self.number = folder, name, number
        self.settings = read_settings(folder / "config.yaml")
        self.lines, self.evaluations = read_lines(folder / "metrics.jsonl"), read_lines(folder / "evaluation.jsonl")
        for line in self.lines:
            line["moved_bytes"] = (
                sum(line.get(f"{kind}_bytes") or 0 for kind in ("pulled", "pushed", "reduced")) or None
            )
        self.summary = read_summary(folder / "summary.json")
        self.by_rank = self.summary.get("by_rank", [])

    @cache
    def table(self, keys: tuple[str, ...], of: str = "lines") -> np.ndarray:
        """Those of the lines, or of="evaluations", that have a number under all of keys: (n, number of keys)
        float64."""
        rows = [[line.get(key) for key in keys] for line in getattr(self, of)]
        kept = [row for row in rows if all(isinstance(value, numbers.Real) for value in row)]
        return np.array(kept, float).reshape(len(kept), len(keys))

    @property
    def lags(self) -> list[int]:
        """How late all reads were, as EmbeddingTable counts; [] without a cache."""
        counted = [line["lags"] for line in self.lines if line.get("lags")]
        width = max(map(len, counted), default=0)
        return np.sum([lags + [0] * (width - len(lags)) for lags in counted], 0).tolist() if width else []

    def state(self, now: float) -> str:
        """How far it is at `now`, seconds since 1970, and what is to know of its way there."""
        said = [self._figures() if self.summary else self._state_on_the_way(now)]
        if self.settings.get("resume"):
            said.append(f"resumed from {self.settings['resume']}")
        return "; ".join(said + ([] if self.evaluations else [pictures.NO_EVALUATION]))

    def _figures(self) -> str:
        shown = [
            (word, self.summary.get(key), key)
            for key, word in (("auc", "AUC "), ("log_loss", "log loss "), ("samples_per_s", ""))
        ]
        figures = [f"{word}{value_text(key, value)}" for word, value, key in shown if value is not None]
        return ", ".join([f"ended after {self.summary['steps']:,} steps", *figures])

    def _state_on_the_way(self, now: float) -> str:
        last = (
            f"at step {self.lines[-1]['step']:,}, {ago(now - (self.folder / 'metrics.jsonl').stat().st_mtime)}"
            if self.lines
            else "never"
        )
        return f"not ended: still going, failed or stopped; logged last {last}"

    def slowest_rank(self) -> str:
        """Which rank had the most work of its own in most of the lines."""
        counts = Counter(self.table(("slowest_rank",))[:, 0].astype(int).tolist())
        if not counts:
            return "-"
        [(rank, times)] = counts.most_common(1)
        host = f" on {self.by_rank[rank]['host']}" if rank < len(self.by_rank) else ""
        return f"rank {rank}{host}, in {times / counts.total():.0%} of the lines"


def ago(seconds: float) -> str:
    """A time since then: '12 s ago'."""
    unit, size = next((u for u in (("days", 86400), ("h", 3600), ("min", 60)) if seconds >= 2 * u[1]), ("s", 1))
    return f"{max(0, seconds) / size:.0f} {unit} ago"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_settings(path: Path) -> dict:
    """config.yaml with its groups' keys joined by dots."""
    import yaml

    def flat(group: dict, above: str = ""):
        for key, value in group.items():
            yield from flat(value, f"{above}{key}.") if isinstance(value, dict) else [(f"{above}{key}", value)]

    try:
        settings = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no settings: name a folder that hetmpi.train wrote")
    return dict(flat(settings))


def read_lines(path: Path) -> list[dict]:
    """A .jsonl file, [] if there is none. A last line that does not end is still being written, and left out."""
    if not path.exists():
        return []
    lines = [line for line in read_text(path).splitlines(keepends=True) if line.endswith("\n")]
    return [checked(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def checked(line: str, place: str) -> dict:
    """One line's values. Raises UserError for what the run log does not write."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}): remove the line") from error
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise UserError(f"{place} has no step: remove the line")
    return values


def read_summary(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        summary = json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): remove the file") from error
    if not isinstance(summary, dict) or not isinstance(summary.get("steps"), int):
        raise UserError(f"{path} is no summary of a run, as it has no steps: remove the file")
    return summary


# The page.

PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>$title</title><style>
:root { color-scheme: light dark; --ink: #1c1c1c; --faint: #9a9a9a; --line: #dddddd; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --faint: #7c7c7c; --line: #3a3a3a; --page: #16181a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1500px; margin: 0 auto; padding: 0 1rem 3rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.note, figcaption { font-size: .85rem; color: var(--ink); opacity: .8; }
.key { display: inline-block; margin-right: 1.2rem; overflow-wrap: anywhere; }
.key svg { width: 1.8rem; height: .7rem; margin-right: .4rem; }
.state { margin: .3rem 0; }
nav { position: sticky; top: 0; background: var(--page); border-bottom: 1px solid var(--line); padding: .4rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; min-width: 6rem; }
.pictures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem 1.6rem; }
figure { margin: 0; min-width: 0; } figure h3 { font-size: .95rem; margin: .3rem 0; overflow-wrap: anywhere; }
figure svg { width: 100%; height: auto; } figure text { font-family: system-ui, sans-serif !important; }
</style></head><body>
<h1>$title</h1>
$body
</body></html>
""")


def page(runs: list[Run]) -> str:
    """The whole page as HTML."""
    now = time.time()
    title = f"hetmpi: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    states = "".join(f"<p class='state'>{key_of(run)} {escape(run.state(now))}</p>\n" for run in runs)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    thin = (
        f'<p class="note">Written {written}. Of more than {pictures.MOST_POINTS} logged steps neighbours are '
        "averaged.</p>\n"
    )
    nav = f"<nav>{''.join(map(key_of, runs))}</nav>\n" if len(runs) > 1 else ""
    drawn = "".join(section(heading, found, runs) for heading, found in pictures.sections(runs).items())
    return PAGE.substitute(title=escape(title), body=nav + states + thin + drawn + summaries(runs) + settings(runs))


def key_of(run: Run) -> str:
    """A run's name with its line."""
    style = pictures.style_of(run)
    dashes = (
        ""
        if style["linestyle"] == "-"
        else f' stroke-dasharray="{" ".join(str(3 * length) for length in style["linestyle"][1])}"'
    )
    line = f'<svg viewBox="0 0 36 10"><path d="M0 5H36" stroke="{style["color"]}" stroke-width="4"{dashes}/></svg>'
    return f'<span class="key">{line}{escape(run.name)}</span>'


def section(heading: str, found: list, runs: list[Run]) -> str:
    """Pictures under a heading, and of those left out why."""
    figures, left_out = [], {}
    for number, picture in enumerate(found):
        if picture.shown(runs):
            figures.append(figure(picture, runs, f"{heading.split()[0].lower()}{number}"))
        else:
            left_out.setdefault(picture.why, []).append(picture.title)
    notes = "".join(
        f'<p class="note">Left out: {escape(", ".join(titles))}: {escape(why)}.</p>\n'
        for why, titles in left_out.items()
    )
    parts = "".join(
        f'<span class="key">{swatch(colour)}{part}</span>' for part, colour in reversed(pictures.PART_COLOURS.items())
    )
    legend = (
        f'<p class="note">Parts, from the top: {parts}</p>\n'
        if any(isinstance(p, pictures.Stack) and p.shown(runs) for p in found)
        else ""
    )
    return f'<h2>{escape(heading)}</h2>\n{notes}{legend}<div class="pictures">\n{"".join(figures)}</div>\n'


def swatch(colour: str) -> str:
    return f'<svg viewBox="0 0 36 14"><path d="M0 0H36V14H0Z" fill="{colour}"/></svg>'


def figure(picture, runs: list[Run], name: str) -> str:
    """One picture with its title, and which runs it lacks."""
    shown = picture.shown(runs)
    lacks = [run.name for run in runs if run not in shown] if not isinstance(picture, pictures.Stack) else []
    caption = " ".join([picture.caption, *([f"Without {', '.join(lacks)}: {picture.why}."] if lacks else [])]).strip()
    drawn, said = pictures.svg(picture, runs, name), escape(caption)
    return f"<figure><h3>{escape(picture.title)}</h3>\n{drawn}<figcaption>{said}</figcaption></figure>\n"


def summaries(runs: list[Run]) -> str:
    """The runs' summaries side by side."""
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.summary) if key not in FOLDED]
    rows = {"slowest_rank": [run.slowest_rank() for run in runs]}
    for key in keys:
        rows.setdefault(key, [value_text(key, run.summary.get(key)) for run in runs])
    rows = {key: texts for key, texts in rows.items() if set(texts) != {"-"}}
    return f"<h2>Summaries</h2>\n{table_of(rows, runs)}"


def settings(runs: list[Run]) -> str:
    """Where the runs' settings differ; of one run all, folded away."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = {key: [setting_text(run.settings.get(key, "-")) for run in runs] for key in keys}
    if len(runs) == 1:
        return f"<h2>Settings</h2>\n<details><summary>all of config.yaml</summary>\n{table_of(rows, runs)}</details>\n"
    for key, name in (
        ("run.dir", ""),
        ("checkpoint.dir", "/checkpoints"),
    ):  # where no other was chosen, it says nothing new
        if all(run.settings.get(key) == f"{run.settings.get('run.dir')}{name}" for run in runs):
            rows.pop(key, None)
    rows = {key: texts for key, texts in rows.items() if len(set(texts)) > 1}
    return "<h2>Settings that differ</h2>\n" + (table_of(rows, runs) if rows else "<p>None.</p>\n")


def setting_text(value) -> str:
    """A value as config.yaml has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def table_of(rows: dict[str, list[str]], runs: list[Run]) -> str:
    """A column per run; a row per key with its texts."""
    head = "".join(f"<th>{key_of(run)}</th>" for run in runs)
    lines = ""
    for key, texts in rows.items():
        lines += f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>\n"
    return f'<div class="wide"><table><tr><th></th>{head}</tr>\n{lines}</table></div>\n'


if __name__ == "__main__":
    main(sys.argv[1:])
