"""Random settings: composed, checked, and given to the constructors of data and model."""

import os
import resource
from pathlib import Path

from fuzz import fuzz
from omegaconf import OmegaConf

from hetmpi.errors import UserError
from hetmpi.run.build import make, make_model
from hetmpi.run.command_line import answer, parse
from hetmpi.run.config import CONF, resolved
from hetmpi.run.settings import declared
from hetmpi.run.sweep import planned
from hetmpi.tasks.task import Task

CLICKS, GRAPHS = (
    ("dcn", "dcnv2", "deepfm", "dlrm", "dnn", "finalmlp", "fm", "lr", "wdl", "widedeep"),
    ("gat", "gcn", "graphsage"),
)
DATA = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
KEYS = {group: sorted((CONF / group).glob("*.yaml")) for group in ("model", "data", "task", "loss")}
ODD = [
    "",
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "2",
    "7",
    "0.5",
    "-0.5",
    "1e-30",
    "1e30",
    "-1e30",
    "1e999",
    "nan",
    "inf",
    "-inf",
    str(10**30),
    str(1 << 63),
    str((1 << 63) - 1),
    str(1 << 20),
    str(1 << 40),
    "9" * 5000,
    "1_0",
    "0x10",
    "1e5",
    "[]",
    "[1]",
    "[0]",
    "[-1]",
    "[1,2]",
    "[1.5]",
    "[a]",
    "[null]",
    "[nan]",
    "[1e30]",
    f"[{10**30}]",
    "[[1,2]]",
    "[[1]]",
    "[[[]]]",
    "[1,[2]]",
    "{}",
    "{a:1}",
    "{a:{b:[1]}}",
    "[{a:1}]",
    "x",
    "''",
    '"a b"',
    "x" * 3000,
    "'" + "y" * 20_000 + "'",
    "[" * 50 + "]" * 50,
    "[" * 1000 + "]" * 1000,
    "{a:" * 300 + "1" + "}" * 300,
    "[" + ",".join("7" * 2000) + "]",
    "${seed}",
    "${nothing}",
    "${",
    "${${seed}}",
    "${oc.env:NOT_THERE}",
    "${table.dim}",
    "${now:%Y}",
    "???",
    "\u2028",
    "'\u2028\n'",
    "\x1b",
    "\udcff",
    "a.b.C",
    "os.getcwd",
    "hetmpi.models.wdl",
    "hetmpi.models.wdl.WDL",
    "=",
    "a=b",
    "~",
    "1,2",
    "range(3)",
    "choice(1,2)",
    "glob(*)",
    "sort(2,1)",
    "int(x)",
    "/",
    "..",
    "%s {}",
    "metis",
    "range",
    "sgd",
    "adam",
]


def case(rng, folder):
    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    data = rng.choice(DATA)
    is_graph = data.startswith(("graph", "debian"))
    model = rng.choice(GRAPHS if is_graph else CLICKS)
    overrides = [f"data={data}", f"model={model}", "table.dim=8"]
    keys = keys_of("data", data) * 3 + keys_of("model", model) * 3 + [setting.key for setting in declared()]
    if "data.path" in keys:
        overrides.append("data.path=/none")
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        overrides.append(changed(rng, rng.choice(keys)))
    kind = rng.random()
    if kind < 0.1:
        return planned(overrides, None)
    if kind < 0.2:
        return answer(parse([*overrides, "--cfg", "job", *rng.choice([[], ["--resolve"]])]))
    config = resolved(overrides)
    OmegaConf.to_yaml(config)
    make(config.data)
    make_model(config, PreparedTask(is_graph, config))
    return None


class PreparedTask(Task):
    """A task without data: what the settings of a model are checked against."""

    def __init__(self, is_graph, config):
        self.is_graph, self.fanout = is_graph, config.data.get("fanout", [])

    def model_arguments(self, dim):
        of_graph = {"num_classes": 3, "num_layers": len(self.fanout)}
        return {"dim": dim, "num_dense": 4, **(of_graph if self.is_graph else {"num_fields": 6})}

    def tables(self, model):
        if not isinstance(model.row_dim, int) or model.row_dim < 1:
            raise UserError("row_dim")


def keys_of(group, name):
    loaded = OmegaConf.load(CONF / group / f"{name}.yaml")
    return [f"{group}.{key}" for key in loaded if key != "defaults"]


def changed(rng, key):
    """An override of a key, often with an odd value, seldom with an odd key."""
    value = rng.choice(ODD)
    if rng.random() < 0.1:
        key = rng.choice(
            [f"{key}.x", key.upper(), key.replace(".", "/"), f"+{key}", f"++{key}", f"~{key}", f"{key}@_global_"]
        )
    if rng.random() < 0.05:
        return rng.choice(
            ["", "=", "x", "+=", "~", "a.b=1", "model=", "data=none", "experiment=x", "hydra.run.dir=x", value]
        )
    return f"{key}={value}"


def test_any_settings_are_right_or_refused_in_one_line(tmp_path):
    fuzz(__file__, tmp_path)
