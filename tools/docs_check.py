"""./run.sh docs check: what README.md, CONTRIBUTING.md and docs/*.md promise is checked, and they are short.

Prints every command of their shell blocks with its check, then what is wrong, and exits with 1 if anything is. Checks:

test       its page is in PASTED: tests/system/test_recipes.py runs the page's bash blocks
settings   of hetmpi train: its settings are composed here, in a folder with the files that the page shows
options    of hetmpi predict, export and so on: each option stands in the command's help
help       of ./run.sh: the command stands in ./run.sh help
file       of python FILE: the file is there, and a test names it
none       none, for the reason in UNCHECKED
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PASTED = ("docs/recipes.md", "docs/your_data.md", "docs/graphs.md")  # run by tests/system/test_recipes.py
MOST_WORDS, MOST_LINES, MOST_COLUMNS = 24_000, 250, 120
GENERATED = "docs/settings.md"  # by tools/settings_page.py from the settings' own texts, which are looked up, not read

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.\w+)\n")  # first line of a block that is a file
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
NAMED_PAGE = re.compile(r"\bdocs/\w+\.md\b")
WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|'"])+|[;&|]+""")
ASSIGNED = re.compile(r"^(?:export )?(\w+)=(?:\"([^\"]*)\"|(\S*))", re.MULTILINE)
LAUNCHER = re.compile(r"(?:timeout|mpirun|mpiexec|horovodrun|srun)\b.*?\b(?=hetmpi |python )")
CLUSTER, INSTALLS, SHELL = "needs a cluster", "installs a package", "of the shell"
UNCHECKED = {  # program -> reason
    **dict.fromkeys(("salloc", "sbatch", "scancel", "scontrol", "squeue", "srun", "qsub", "bsub", "module"), CLUSTER),
    **dict.fromkeys(("apptainer", "singularity", "docker", "podman"), "needs an image"),
    **dict.fromkeys(("apt-get", "conda", "git", "pip", "python -m pip", "python -m venv"), INSTALLS),
    **dict.fromkeys((".", "[", "cat", "cd", "cp", "echo", "exit", "export", "grep", "ls", "mkdir", "mv", "set"), SHELL),
    **dict.fromkeys(("source", "tail", "touch", "unset"), SHELL),
    "tensorboard": "serves until it is stopped",
    "python slurm/sweep.py": "needs a cluster; ./run.sh slurm-trial runs it",
    "python tests/support/bits_check.py": "trains for minutes; for changes that must keep every bit",
}  # fmt: skip


class Block(NamedTuple):
    """A fenced block. line: the number of its first line of text."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str) -> list[Block]:
    return [Block(one[1], one[2], text[: one.start(2)].count("\n") + 1) for one in BLOCK.finditer(text)]


def written(blocks, folder: Path):
    """Writes the blocks that begin with a comment with a path, such as `# conf/model/mine.yaml`."""
    for language, text, *_ in blocks:
        path = FILE.match(text)
        if language not in ("bash", "sh") and path:
            (folder / path[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / path[1]).write_text(text)


def prose_of(text: str) -> str:
    """The text with empty lines in the place of blocks and of comments."""
    empty = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
    return empty.sub(lambda found: "\n" * found[0].count("\n"), text)


def broken_links() -> list[str]:
    """Links between files of the checkout that lead nowhere, and pages that files name but that are not there."""
    found = []
    for page in [path for folder in (".", "docs", "packaging", "slurm") for path in ROOT.glob(f"{folder}/*.md")]:
        for link in LINK.findall(prose_of(page.read_text())):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if ":" in path or (target.exists() and (not anchor or anchor in anchors_of(target))):
                continue
            found.append(f"{name_of(page)}: {link} leads nowhere")
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        if file.endswith((".py", ".h", ".cpp", ".cu", ".yaml", ".sh", ".sbatch", "run.sh")):
            named = NAMED_PAGE.findall((ROOT / file).read_text())
            found += [f"{file}: there is no {page}" for page in sorted(set(named)) if not (ROOT / page).exists()]
    return found


def anchors_of(page: Path) -> set[str]:
    """As GitHub and myst-parser name them."""
    if page.suffix != ".md":
        return set()
    anchors: list[str] = []
    for heading in HEADING.findall(prose_of(page.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        again = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in anchors)
        anchors.append(f"{slug}-{again}" if again else slug)
    return set(anchors)


def long_lines() -> list[str]:
    """Lines of prose with too many columns; rows of tables and what is no longer than a link are exempt."""
    return [
        f"{name_of(page)}:{number}: {len(line)} columns, at most {MOST_COLUMNS}"
        for page in pages()
        for number, line in enumerate(prose_of(page.read_text()).split("\n"), 1)
        if len(line) > MOST_COLUMNS and not line.startswith("|") and not re.fullmatch(r"\S*\[[^]]*\]\(\S+", line)
    ]


def long_pages() -> list[str]:
    """Pages with too many lines, and the sum of words."""
    texts = {name_of(page): page.read_text() for page in pages()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    words = sum(len(text.split()) for name, text in texts.items() if name != GENERATED)
    found = [f"{name}: {count} lines, at most {MOST_LINES}" for name, count in lines.items() if count > MOST_LINES]
    return found + ([f"all written pages: {words:,} words, at most {MOST_WORDS:,}"] if words > MOST_WORDS else [])


class Command(NamedTuple):
    """A command of a page. check: its name, or the reason why there is none; wrong: what the check found."""

    place: str
    text: str
    check: str
    wrong: str


def commands() -> Iterator[Command]:
    """Every command of the pages' shell blocks, checked."""
    before = os.getcwd()
    for page in pages():
        blocks = blocks_of(page.read_text())
        with tempfile.TemporaryDirectory() as folder:
            written(blocks, Path(folder))
            os.chdir(folder)  # where settings are composed
            try:
                for block in blocks:
                    if block.language in ("bash", "sh"):
                        is_pasted = name_of(page) in PASTED and block.language == "bash"
                        for line, text in commands_of(block):
                            yield Command(
                                f"{name_of(page)}:{line}", text, *(("test", "") if is_pasted else checked(text))
                            )
            finally:
                os.chdir(before)


def commands_of(block: Block) -> Iterator[tuple[int, str]]:
    """The line number and the text of each command, with the block's variables replaced."""
    values = {name: quoted or plain for name, quoted, plain in ASSIGNED.findall(block.text)}
    number = block.line
    for text in re.split(r"(?<!\\)\n", block.text):
        begins, number = number, number + text.count("\n") + 1
        text = text.replace("\\\n", " ")
        for name, value in values.items():
            text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", lambda _, value=value: value, text)
        command: list[str] = []
        for word in WORD.findall(text):
            if word.startswith("#"):
                break
            if set(word) <= set(";&|"):
                if command:
                    yield begins, " ".join(command)
                command = []
            else:
                command.append(word)
        if command:
            yield begins, " ".join(command)


def checked(text: str) -> tuple[str, str]:
    """The check of a command, and what it finds; "" for nothing."""
    words = shlex.split(LAUNCHER.sub("", text, count=1))
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if not words:
        return f"none: {SHELL}", ""
    if words[0] in ("python", "python3"):
        words = ["python", *(word for word in words[1:] if word not in ("-X", "faulthandler"))]
    if words[:2] == ["python", "-m"] and words[2].startswith("hetmpi."):
        words = ["hetmpi", words[2].removeprefix("hetmpi."), *words[3:]]
    if words[0] == "./run.sh":
        if words[1] not in ("train", "predict", "export", "inspect", "report"):
            return "help", run_sh(words[1:])
        words[0] = "hetmpi"
    if words[0] == "hetmpi":
        return ("settings", settings(words[2:])) if words[1] == "train" else ("options", options(*words[1:]))
    for known in (" ".join(words[:3]), " ".join(words[:2]), words[0]):
        if known in UNCHECKED:
            return f"none: {UNCHECKED[known]}", ""
    if words[0] == "python":
        return "file", named_by_a_test(words[1])
    return "none", f"{words[0]} is not in UNCHECKED of tools/docs_check.py"


def settings(arguments: list[str]) -> str:
    """Composes the settings of a training, or of a sweep's points."""
    from hetmpi.errors import UserError
    from hetmpi.run.command_line import parse
    from hetmpi.run.config import resolved
    from hetmpi.run.sweep import planned

    try:
        asked = parse([re.sub(r"\$\{?(\w+)\}?", r"\1", one) for one in arguments])
        (planned if asked.multirun else resolved)(asked.overrides, asked.config_dir)
    except UserError as error:
        return str(error)
    return ""


def options(command: str, *arguments: str) -> str:
    """Looks for each option in the command's help."""
    try:
        said = (ROOT / f"hetmpi/{command}.py").read_text().split('"""')[1]
    except OSError:
        return f"there is no command hetmpi {command}"
    for argument in arguments:
        name, is_option, value = argument.partition("=")
        if is_option and f"{name}=" not in said and not name.startswith("data."):
            return f"hetmpi {command} has no {name}="
        listed = re.search(rf"\b{re.escape(name)}=([\w|]+\|[\w|]+)", said)
        if is_option and listed and value not in listed[1].split("|"):
            return f"hetmpi {command} has no {argument}"
    return ""


def run_sh(words: list[str]) -> str:
    said = (ROOT / "run.sh").read_text().partition("help() {")[2].partition("\nEND\n")[0]
    if not re.search(rf"^  {re.escape(' '.join(words[:1]))}\b", said, re.MULTILINE):
        return f"./run.sh help does not list {words[0]}"
    if words[0] == "bench" and not (ROOT / f"bench/{words[1]}.py").exists():
        return f"there is no bench/{words[1]}.py"
    return ""


def named_by_a_test(file: str) -> str:
    if not (ROOT / file).exists():
        return f"there is no {file}"
    if any(Path(file).name in path.read_text() for path in ROOT.glob("tests/**/*.py")):
        return ""
    return f"no test names {file}"


def unchecked_commands() -> list[str]:
    return [f"{one.place}: {one.text}: {one.wrong}" for one in commands() if one.wrong]


CHECKS = (unchecked_commands, broken_links, long_lines, long_pages)


def main() -> int:
    for command in commands():
        name, _, reason = command.check.partition(": ")
        print(f"{name:<9} {command.place:<28} {command.text}" + (f"  ({reason})" if reason else ""))
    wrong = [line for check in CHECKS for line in check()]
    print("", *wrong, f"=== docs check: {len(wrong)} wrong ===", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(ROOT))
    sys.exit(main())
