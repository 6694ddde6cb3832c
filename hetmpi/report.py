"""Writes a self-contained HTML page that shows and compares one or several runs, without MPI.

    hetmpi report RUN [RUN ...] [out=FILE]

RUN is a run folder (run.dir) or a folder of run folders, such as that of a sweep. The default FILE is report.html, in
RUN if there is only one.
"""

from __future__ import annotations

import base64
import errno
import gzip
import json
import sys
import time
from html import escape
from pathlib import Path
from string import Template

from hetmpi.bounded_file import shown
from hetmpi.errors import UserError, check_paths, one_line
from hetmpi.log import pictures
from hetmpi.log.figures import figure_of, value_text
from hetmpi.log.files import replace
from hetmpi.log.headline import Cell, compared_rows, conclusion
from hetmpi.log.record import Run, differing_settings, runs_of, setting_text
from hetmpi.spans import PARTS


def main(arguments: list[str]):
    """Reads the command line, writes the page, prints its path."""
    folders = [argument for argument in arguments if not argument.startswith("out=")]
    outs = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    if not folders or len(outs) > 1:
        sys.exit(__doc__)
    default = Path(folders[0]) / "report.html" if len(folders) == 1 else Path("report.html")
    try:
        check_paths("RUN", folders, {"out": "".join(outs)})
        out = write_report([Path(folder) for folder in folders], Path(outs[0]) if outs else default)
        print(f"wrote {one_line(out, 4096)}")
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")


def write_report(folders: list[Path], out: Path) -> Path:
    """Writes the page of the runs in these folders to `out`, in place of a file or a link of that name, and returns
    `out`. Raises UserError if a folder is not a run folder, or a file cannot be read or written."""
    text = page(runs_of(folders))
    try:
        if out.exists() and not out.is_file():
            raise FileExistsError(errno.EEXIST, "it is not a regular file")
        replace(out, text)
    except OSError as error:
        raise UserError(f"cannot write {shown(out)}: {error.strerror}: choose another path with out=FILE") from error
    return out


# The page.

PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>$title</title><style>
:root { color-scheme: light dark; --ink: #1c1c1c; --line: #dddddd; --page: #ffffff; --best: #d9f2e3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --line: #3a3a3a; --page: #16181a; --best: #1d4a33; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1500px; margin: 0 auto; padding: 0 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 1rem 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.note, figcaption { font-size: .85rem; opacity: .8; }
.key { display: inline-block; margin-right: 1.2rem; overflow-wrap: anywhere; }
.key svg { width: 1.8rem; height: .7rem; margin-right: .4rem; }
nav { position: sticky; top: 0; z-index: 1; background: var(--page); border-bottom: 1px solid var(--line);
  margin-top: 1rem; padding: .4rem 0; }
.conclusion { font-size: 1.1rem; max-width: 60rem; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
#undrawn { border-left: 4px solid #d55e00; padding-left: .8rem; }
.switch { display: inline-block; margin-right: 2rem; } .switch button { font: inherit; color: inherit;
  background: none; border: 1px solid var(--line); padding: .1rem .7rem; cursor: pointer; }
.switch button[aria-pressed=true] { background: var(--best); font-weight: 600; }
button.key { font: inherit; color: inherit; background: none; border: 0; padding: .1rem 0; cursor: pointer; }
button.key[aria-pressed=false] { opacity: .35; text-decoration: line-through; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem .4rem;
  border-bottom: 1px solid var(--line); }
tr > th:first-child { font-weight: 500; } td { overflow-wrap: anywhere; min-width: 7rem; max-width: 26rem; }
.headline { font-size: .95rem; font-variant-numeric: tabular-nums; }
.best { background: var(--best); font-weight: 600; } td small { opacity: .75; margin-left: .4rem; font-weight: 400; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
  gap: 1.2rem 1.6rem; }
figure { margin: 0; min-width: 0; } figure h3 { font-size: .95rem; margin: .3rem 0; overflow-wrap: anywhere; }
.plot { height: 17rem; } summary { cursor: pointer; } summary h2 { display: inline-block; }
</style></head><body>
<h1>$title</h1>
$body
<!-- plotly.js, MIT license, and the figures as JSON, both in gzip and base64. -->
<script type="application/gzip" id="plotly">$plotly</script>
<script type="application/gzip" id="figures">$figures</script>
<script>$program</script>
</body></html>
""")

PROGRAM = """
const hidden = new Set();  // numbers of runs
let figures = {};  // id -> figure, as in hetmpi/log/pictures.py, and `samples`, which is like `time`
const isDark = matchMedia("(prefers-color-scheme: dark)");

// The layout of all pictures: the page's font and colours, margins, hover text with the values of all runs.
function template() {
  const styles = getComputedStyle(document.documentElement);
  const [ink, line, page] = ["--ink", "--line", "--page"].map((name) => styles.getPropertyValue(name).trim());
  const axis = {gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true,
    title: {font: {size: 12}, standoff: 8}};
  return {layout: {font: {family: "system-ui, sans-serif", size: 12, color: ink}, showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 56, r: 12, t: 30, b: 44},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink},
    hovermode: "x unified", hoverlabel: {bgcolor: page, bordercolor: line, font: {color: ink}, namelength: 40},
    barmode: "group", dragmode: "zoom", xaxis: axis, yaxis: axis}};
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function draw() {
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  figures = JSON.parse(await unpacked("figures"));
  for (const [id, figure] of Object.entries(figures)) {
    const {data, layout} = figure;
    figure.samples = {x: data.map((trace) => trace.x), title: layout.xaxis.title.text};
    Plotly.newPlot(id, data, {...layout, template: template()}, {responsive: true, displaylogo: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]});
  }
}

draw().catch((error) => {
  document.getElementById("undrawn").hidden = false;
  throw error;
});

isDark.addEventListener("change", () => {
  for (const id of Object.keys(figures)) Plotly.relayout(id, {template: template()});
});

// The switch draws all curves over samples, or over time.
const axes = document.querySelectorAll("button[data-axis]");
for (const button of axes)
  button.addEventListener("click", () => {
    for (const each of axes) each.setAttribute("aria-pressed", each === button);
    for (const [id, figure] of Object.entries(figures)) {
      if (!figure.time) continue;
      const {x, title} = figure[button.dataset.axis];
      Plotly.update(id, {x}, {"xaxis.title.text": title, "xaxis.autorange": true});
    }
  });

// The button with a run's name hides the run in all pictures, or shows it again.
for (const button of document.querySelectorAll("button[data-run]"))
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    hidden.has(run) ? hidden.delete(run) : hidden.add(run);
    button.setAttribute("aria-pressed", !hidden.has(run));
    for (const figure of document.querySelectorAll(`figure[data-run="${run}"]`)) figure.hidden = hidden.has(run);
    for (const [id, {data}] of Object.entries(figures)) {
      const mine = data.flatMap((trace, place) => trace.meta === run ? [place] : []);
      if (mine.length) Plotly.restyle(id, {visible: !hidden.has(run)}, mine);
    }
  });
"""


SWITCH = (
    '<span class="switch" role="group" aria-label="x axis of the curves">Curves over '
    '<button data-axis="samples" aria-pressed="true">samples</button>'
    '<button data-axis="time" aria-pressed="false">time</button></span>'
)
NEEDED = "The pictures need JavaScript and Chrome 80, Edge 80, Firefox 113, Safari 16.4 or a later version of them."
UNDRAWN = f'<p id="undrawn" hidden>{NEEDED}</p>\n<noscript><p>{NEEDED}</p></noscript>\n'


def page(runs: list[Run]) -> str:
    """The whole page as HTML."""
    now = time.time()
    title = f"hetmpi: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    figures: dict[str, dict] = {}
    drawn = "".join(section(heading, found, runs, figures) for heading, found in pictures.sections(runs).items())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    note = f"Written {written}. Lines with more than {pictures.MOST_POINTS} points are averaged over neighbours."
    parts = (
        f'<p class="conclusion">{escape(conclusion(runs))}</p>\n', headline(runs, now), settings(runs),
        navigation(runs, figures), UNDRAWN, f'<p class="note">{note}</p>\n', drawn, summaries(runs), all_settings(runs),
    )  # fmt: skip
    text = json.dumps(figures, separators=(",", ":"))
    return PAGE.substitute(
        title=escape(title), body="".join(parts), plotly=base64_text(library()),
        figures=base64_text(gzip.compress(text.encode())), program=PROGRAM,
    )  # fmt: skip


def library() -> bytes:
    """plotly.js in gzip: 2 MB of a page in place of 4.8."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), mtime=0)


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def navigation(runs: list[Run], figures: dict[str, dict]) -> str:
    """The switch of the curves' x axis, if there are curves, and for several runs a button per run that hides or shows
    it."""
    content = SWITCH * any("time" in figure for figure in figures.values()) + (run_buttons(runs) if runs[1:] else "")
    return f"<nav>{content}</nav>\n" if content else ""


def run_buttons(runs: list[Run]) -> str:
    title = "hide or show this run in all pictures"
    return "".join(
        f'<button class="key" data-run="{run.number}" aria-pressed="true" title="{title}">{line_of(run)}'
        f"{escape(run.name)}</button>"
        for run in runs
    )


def line_of(run: Run) -> str:
    """A sample of a run's line in the pictures."""
    style = pictures.style_of(run)
    dashes = {"solid": "", "dash": ' stroke-dasharray="8 5"', "dot": ' stroke-dasharray="3 4"'}[style["dash"]]
    return f'<svg viewBox="0 0 36 10"><path d="M0 5H36" stroke="{style["color"]}" stroke-width="4"{dashes}/></svg>'


def key_of(run: Run) -> str:
    """A run's name with a sample of its line."""
    return f'<span class="key">{line_of(run)}{escape(run.name)}</span>'


def headline(runs: list[Run], now: float) -> str:
    """The comparison of the runs, a column per run."""
    rows = "".join(row(name, cells) for name, cells in compared_rows(runs, now))
    return table(rows, runs, "headline")


# Pictures.


def section(heading: str, found: list, runs: list[Run], figures: dict[str, dict]) -> str:
    """Pictures under a heading, with notes on runs that are missing in some of them. Adds their data to `figures`, by
    id."""
    drawn, lacking = [], {}
    for number, picture in enumerate(found):
        shown = picture.shown(runs)
        if shown:
            name = f"{heading.split()[0].lower()}{number}"
            figures[name] = picture.figure(shown)
            drawn.append(frame(picture, name))
        lacks = [] if shown and picture.run else [run for run in runs if run not in shown]
        for why in dict.fromkeys(map(picture.reason, lacks)):
            names = [run.name for run in lacks if picture.reason(run) == why]
            said = f"Not shown for {', '.join(names)}" if len(names) < len(runs) else "Not shown"
            lacking.setdefault((said, why), []).append(picture.title)
    notes = [f"{said}: {', '.join(titles)}: {why}." for (said, why), titles in lacking.items()]
    said = "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)
    has_parts = any(isinstance(picture, pictures.Stack) and picture.shown(runs) for picture in found)
    legend = parts_legend() if has_parts else ""
    return f'<h2>{escape(heading)}</h2>\n{said}{legend}<div class="pictures">\n{"".join(drawn)}</div>\n'


def frame(picture, name: str) -> str:
    """The HTML element of one picture, with its title and caption."""
    of_run = "" if picture.run is None else f' data-run="{picture.run.number}"'
    said = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    plot = f'<div class="plot" id="{name}"></div>'
    return f"<figure{of_run}><h3>{escape(picture.title)}</h3>\n{plot}{said}</figure>\n"


def parts_legend() -> str:
    """Legend of the parts of a step, with a description of each part as hover text."""
    keys = "".join(
        f'<span class="key" title="{escape(PARTS[part])}">{swatch(colour)}{part}</span>'
        for part, colour in reversed(pictures.PART_COLOURS.items())
    )
    return f'<p class="note">Parts of a step, from the top: {keys}</p>\n'


def swatch(colour: str) -> str:
    return f'<svg viewBox="0 0 36 14"><path d="M0 0H36V14H0Z" fill="{colour}"/></svg>'


# Tables.


def settings(runs: list[Run]) -> str:
    """The settings that differ between the runs."""
    if len(runs) == 1:
        return ""
    rows = differing_settings(runs)
    return "<h2>Settings that differ</h2>\n" + (table_of(rows, runs) if rows else "<p>None.</p>\n")


def all_settings(runs: list[Run]) -> str:
    """Every setting, in a collapsed section."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = {key: [setting_text(run.settings.get(key, "-")) for run in runs] for key in keys}
    return folded("All settings", "as in config.yaml", table_of(rows, runs))


def summaries(runs: list[Run]) -> str:
    """Every figure of the runs' summaries, in a collapsed section."""
    rows = {figure_of("slowest_rank").name: [run.slowest_rank() for run in runs]}
    for key in dict.fromkeys(key for run in runs for key in run.summary):
        if key not in ("by_rank", "slowest_rank"):
            rows[figure_of(key).name] = [value_text(key, run.summary.get(key)) for run in runs]
    rows = {name: texts for name, texts in rows.items() if set(texts) != {"-"}}
    return folded("All figures", "counts and bytes are of the whole run and of all ranks", table_of(rows, runs))


def folded(heading: str, note: str, content: str) -> str:
    return f'<details><summary><h2>{heading}</h2> <span class="note">{note}</span></summary>\n{content}</details>\n'


def table_of(rows: dict[str, list[str]], runs: list[Run]) -> str:
    """A table with a column per run and a row per name. rows: name -> one text per run."""
    return table("".join(row(name, list(map(Cell, texts))) for name, texts in rows.items()), runs)


def table(lines: str, runs: list[Run], kind: str = "plain") -> str:
    head = "".join(f"<th>{key_of(run)}</th>" for run in runs)
    return f'<div class="wide"><table class="{kind}"><tr><th></th>{head}</tr>\n{lines}</table></div>\n'


def row(name: str, cells: list[Cell]) -> str:
    return f"<tr><th>{escape(name)}</th>{''.join(map(cell, cells))}</tr>\n"


def cell(shown: Cell) -> str:
    kind = ' class="best"' if shown.is_best else ""
    note = f" <small>{escape(shown.note)}</small>" if shown.note else ""
    return f"<td{kind}>{escape(str(shown.text))}{note}</td>"


if __name__ == "__main__":
    main(sys.argv[1:])
