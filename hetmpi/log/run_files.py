"""The files of a run folder, read without trust in who wrote them: a UserError names the file, and the line, that the
trainer cannot have written."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from hetmpi.bounded_file import LARGEST_NUMBER, open_regular, parsed_json, read_bytes, read_text, shown
from hetmpi.errors import UserError, one_line
from hetmpi.log.figures import FIGURES
from hetmpi.log.files import flat
from hetmpi.log.lines import Lines, read_columns

LARGEST_SETTINGS, LARGEST_OBJECT = 4 << 20, 16 << 20  # bytes of config.yaml, and of a .json file
LARGEST_LINES, LARGEST_LINE = 1 << 28, 1 << 20  # bytes of a .jsonl file, and of a line
MANY_LINES = 1000  # are read as columns
MOST_KEYS = 1000  # of all lines of a file: the page has pictures of each
MOST_LEVELS = 64  # of groups and lists in config.yaml
MOST_BINS = 64  # of a histogram of lags
CURVE_WIDTHS, MOST_CURVE_POINTS = {"calibration": 3, "roc": 2, "precision": 2}, 1000
LARGEST_COUNT = 1 << 53
COUNTS = ("step", "steps", "first_step", "world_size", "slowest_rank")
NUMBERS = {key for key, figure in FIGURES.items() if figure.group and key != "lags"} - set(COUNTS)


def read_settings(path: Path) -> dict:
    """The settings in config.yaml, with keys joined by dots. Raises UserError."""
    text = read_text(path, LARGEST_SETTINGS)
    try:
        check_events(text)
        settings = plain(yaml.load(text, SAFE_LOADER))
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of a date or a number that Python cannot hold
        raise UserError(f"{shown(path)} is not YAML: {one_line(' '.join(str(error).split()), 400)}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{shown(path)} holds no settings: name one that hetmpi.train wrote")
    return flat(settings)


SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_events(text: str):
    """Raises ValueError for what the trainer does not write and what can make a short text a large value: aliases, tags
    and deep nesting. Raises yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(text, SAFE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"settings have no aliases, as *{event.anchor}")
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
            raise ValueError(f"settings have no tags, as {event.tag}")
        if depth > MOST_LEVELS:
            raise ValueError(f"settings are nested in at most {MOST_LEVELS} levels")


def plain(value):
    """A value of YAML as one of JSON: keys and dates become texts. Raises ValueError for an integer too long to be
    printed."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ValueError("a number is too large")
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def read_lines(path: Path) -> list[dict]:
    """The lines of a .jsonl file, [] if there is none. A last line without a newline is still being written and is left
    out. Raises UserError."""
    if not os.path.exists(path):
        return []
    lines, keys, left = [], set(), LARGEST_LINES
    with open_regular(path) as file:
        while line := file.readline(LARGEST_LINE + 1):
            place, left = f"{shown(path)}, line {len(lines) + 1}", left - len(line)
            if len(line) > LARGEST_LINE:
                raise UserError(f"{place}: more than {LARGEST_LINE:,} bytes: remove the line")
            if left < 0:
                raise UserError(
                    f"{shown(path)} has more than {LARGEST_LINES:,} bytes: keep every tenth line, as by "
                    "awk 'NR % 10 == 1', and log fewer steps with log.every_steps"
                )
            if not line.endswith(b"\n"):
                break
            lines.append(checked(line, place))
            keys.update(lines[-1])
            if len(keys) > MOST_KEYS:
                raise UserError(f"{place}: more than {MOST_KEYS:,} names of figures: remove the line")
    return lines


def read_metrics(path: Path) -> Lines:
    """The lines of metrics.jsonl as columns, as read_lines. Raises UserError."""
    if os.path.exists(path) and os.path.getsize(path) <= LARGEST_LINES:
        data = read_bytes(path, LARGEST_LINES)
        data = data[: data.rfind(b"\n") + 1]
        found = read_columns(data, COUNTS, NUMBERS, MOST_BINS) if data.count(b"\n") >= MANY_LINES else None
        if found is not None and len(found.columns) <= MOST_KEYS:
            begin = data.rfind(b"\n", 0, -1) + 1
            found.last = checked(data[begin:], f"{shown(path)}, the last line")
            return found
    return Lines.of(read_lines(path))


def checked(line: bytes, place: str) -> dict:
    """The values of one line. Raises UserError if the run log cannot have written it."""
    values = parsed(line, place, "remove the line")
    if not isinstance(values, dict) or not is_count(values.get("step")):
        raise UserError(f"{place} has no step: remove the line")
    check_figures(values, place, "remove the line")
    return values


def read_summary(path: Path) -> dict:
    """The contents of summary.json, {} if there is none. Raises UserError."""
    found = read_object(path)
    if found or os.path.exists(path):
        if not is_count(found.get("steps")):
            raise UserError(f"{shown(path)} has an unexpected format, without steps: remove the file")
        check_figures(found, shown(path), "remove the file")
    return found


def read_status(path: Path) -> dict:
    """The contents of status.json, {} if there is none. Raises UserError."""
    found = read_object(path)
    if not is_number(found.get("time", 0)):
        raise UserError(f"{shown(path)}: time must be a number: remove the file")
    return found


def read_environment(path: Path) -> dict:
    """The contents of environment.json, {} if there is none. Raises UserError."""
    found = read_object(path)
    hosts = found.get("ranks_by_host") or {}
    if not isinstance(hosts, dict) or not all(map(is_count, hosts.values())):
        raise UserError(f"{shown(path)}: ranks_by_host must be numbers of ranks by host: remove the file")
    return found


def read_curves(path: Path) -> dict:
    """The contents of curves.json, {} if there is none. Raises UserError."""
    found = read_object(path)
    for name, width in CURVE_WIDTHS.items():
        points = found.get(name, [])
        is_right = isinstance(points, list) and len(points) <= MOST_CURVE_POINTS
        if not is_right or not all(isinstance(p, list) and len(p) == width and all(map(is_number, p)) for p in points):
            raise UserError(f"{shown(path)}: {name} must be points of {width} numbers: remove the file")
    unseen = found.get("unseen", {})
    if not isinstance(unseen, dict) or not all(
        isinstance(counts, list) and len(counts) == 2 and all(map(is_count, counts)) for counts in unseen.values()
    ):
        raise UserError(f"{shown(path)}: unseen must be two counts by column: remove the file")
    if found and not is_count(found.get("step")):
        raise UserError(f"{shown(path)}: step must be an integer of at least 0: remove the file")
    return found


def read_object(path: Path) -> dict:
    """The object in a .json file, {} if there is none. Raises UserError."""
    if not os.path.exists(path):
        return {}
    found = parsed(read_bytes(path, LARGEST_OBJECT), shown(path), "remove the file")
    if not isinstance(found, dict):
        raise UserError(f"{shown(path)} has an unexpected format: remove the file")
    return found


def parsed(text: bytes, place: str, cure: str):
    try:
        return parsed_json(text, place)
    except UserError as error:
        raise UserError(f"{error}: {cure}") from error


def check_figures(values: dict, place: str, cure: str):
    """Raises UserError unless the figures among the values have the types that the trainer writes."""
    for key, value in values.items():
        if value is None:
            continue
        wrong = None
        if key in NUMBERS and not is_number(value):
            wrong = "a number"
        elif key in COUNTS and not is_count(value):
            wrong = "an integer of at least 0"
        elif key == "lags" and not (isinstance(value, list) and len(value) <= MOST_BINS and all(map(is_count, value))):
            wrong = f"a list of at most {MOST_BINS} counts"
        if wrong:
            raise UserError(f"{place}: {key} must be {wrong}, got {one_line(value, 80)}: {cure}")


def is_count(value) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_rank(said) -> bool:
    """Whether an entry of by_rank has the format that the trainer writes."""
    return isinstance(said, dict) and is_number(said.get("own_ms")) and "host" in said
