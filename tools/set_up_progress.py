"""Progress of a step of the set-up, read from what its programs print. On a terminal it is one line, redrawn every
second; in a pipe or a file a line for each change, and after QUIET_S seconds without one."""

import os
import re
import subprocess
import sys
import threading
import time

QUIET_S, LEAST_S = 8, 2  # at most and at least between two lines in a pipe
FILE = r"(?:\S*/)?([A-Za-z0-9_.]+)-(\d[\w.!+]*?)(?:-[^\s/]*|\.tar\.gz|\.zip)?"  # pyarrow-26.0.1-cp311-…-x86_64.whl
# What pip, uv, CMake, ninja, setuptools and compilers print -> what is said of it.
FORMS = [
    (re.compile(pattern), said)
    for pattern, said in (
        (r"\s*Collecting (\S+)", "looking for {0}"),
        (r"\s*(?:Downloading|Using cached) \S*\.metadata", None),
        (rf"\s*Downloading {FILE} (\([\d.]+ [kMG]?B\))", "downloading {0} {1} {2}"),
        (rf"\s*Using cached {FILE} (\([\d.]+ [kMG]?B\))", "taking {0} {1} from the cache of pip {2}"),
        (rf"\s*Processing {FILE}$", "preparing {0} {1}"),
        (r"\s*Downloading (\S+) (\([\d.]+[KMG]?i?B\))", "downloading {0} {1}"),  # of uv, as the next two
        (r"\s*Downloaded (\S+)", "downloaded {0}"),
        (r"\s*Prepared (\d+) packages?", "installing {0} packages"),
        (r"\s*Building (?:wheel|editable) for (\S+)", "building {0}"),
        (r"\s*-- Build files have been written", "compiling"),
        (r"\s*-- ", "configuring"),
        (r"\s*\[\d+/\d+\] Linking", "linking"),
        (r"\s*\[(\d+/\d+)\] .*?([^/\s]+?)(?:\.o)?$", "compiling [{0}] {1}"),
        (r"\s*Installing collected packages: (.*)", "installing {count} packages"),
        (r"\s*(?:Successfully |Installed \d+ package)", ""),
    )
]
COMPILER = re.compile(r"\s*\S*(?:cc|\+\+|clang)\S* .*-c .*?(\S+\.(?:cpp|cc|cu|c|h))\b")


def say(text):
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    print(f"hetmpi set-up: {text}", file=sys.stderr, flush=True)


def output(*command):
    """What a program prints, to either stream."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return done.stdout.decode(errors="replace")


class Progress:
    """Runs a step's programs, writes what they print to `log`, and shows how far they are until the step ends."""

    def __init__(self, title, log):
        self.title, self.at, self.fetched = title, "", ""  # fetched: the last download
        self.num_files, self.num_compiled = 0, 0
        self.log = open(log, "w", errors="replace")  # noqa: SIM115
        self.ended, self.thread = threading.Event(), threading.Thread(target=self.show, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.ended.set()
        self.thread.join()
        self.log.close()

    def call(self, command, env):
        """Raises CalledProcessError if the command fails."""
        self.log.write("$ " + " ".join(command) + "\n")
        program = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        try:
            for line in program.stdout:
                self.log.write(line)
                self.log.flush()
                self.read(line.rstrip())
        except KeyboardInterrupt:
            program.wait()  # it is interrupted too
            raise
        if program.wait():
            raise subprocess.CalledProcessError(program.returncode, command)

    def read(self, line):
        """Learns from one line where the step is."""
        files = re.match(r"\s*(\d+) files to compile$", line)
        if files:
            self.num_files = int(files[1])
        compiled = COMPILER.match(line)
        if compiled:
            self.num_compiled += 1
            of_all = f"/{self.num_files}" if self.num_files else ""
            self.at = f"compiling [{self.num_compiled}{of_all}] {compiled[1]}"
            return
        so_far = re.match(r"Progress (\d+) of (\d+)", line)  # of pip, in bytes
        if so_far:
            done, size = map(int, so_far.groups())
            self.at = f"{self.fetched}, {100 * done // max(size, 1)} %"
            return
        for pattern, said in FORMS:
            fits = pattern.match(line)
            if fits:
                if said is not None:
                    self.at = said.format(*fits.groups(), count=line.count(",") + 1).rstrip()
                    self.fetched = self.at
                return

    def show(self):
        began = told_at = time.time()
        told = ""
        while not self.ended.wait(1):
            at, now = self.at, time.time()
            text = f"{self.title}{at and ': '}{at}, {int(now - began)} s"
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{text[: os.get_terminal_size(2).columns - 1]}")
                sys.stderr.flush()
            elif now - told_at >= QUIET_S or (at != told and now - told_at >= LEAST_S):
                print(text, file=sys.stderr, flush=True)
                told, told_at = at, now
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
