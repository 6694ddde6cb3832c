"""Every configuration in conf/ is composed and built."""

import json
import re
import runpy
from pathlib import Path

import pytest
from hydra.utils import get_class
from launch import CLICK_MODELS, ROOT
from omegaconf import OmegaConf

from hetmpi.errors import LARGEST, UserError
from hetmpi.run.build import OWN_OPTIM, check_model_fits, default_per_pull, make, optimizer_of
from hetmpi.run.command_line import help_text
from hetmpi.run.config import CONF, cache_of, check_value, resolved, staleness_of
from hetmpi.run.settings import PARTS, REMOVED, declared
from hetmpi.run.sweep import planned
from hetmpi.schedule import Schedule
from hetmpi.table.optim import RowOptimizer
from hetmpi.wire.transport import FORMER_NAMES, current_name

SETTINGS_PAGE = ROOT / "docs/settings.md"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
GRAPHS = ("computers", "cora")  # experiments whose data lie in a file
DATA = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_of_model_and_data_is_composed(model, data):
    path = ["data.path=/some/file"] if data in ("criteo", "tabular", "graph", "triples") else []
    config = resolved([f"model={model}", f"data={data}", *path])
    assert (config.model_name, config.data_name) == (model, data)
    assert get_class(config.model._target_) and get_class(config.data._target_)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_composed_and_can_be_overridden(experiment):
    of_links = experiment.partition("wn18rr_")[2]  # its model
    path = ["data.path=/some/file"] if experiment in GRAPHS or of_links else []
    config = resolved([f"experiment={experiment}", "table.staleness=7", *path])
    assert (config.model_name, config.table.dim, config.table.staleness) == (
        of_links or ("gcn" if experiment in GRAPHS or experiment.startswith("het_") else "wdl"),
        {"demo": 32, "rotate": 256, "transe": 256, "distmult": 256, **dict.fromkeys(GRAPHS, 64)}.get(
            of_links or experiment, 128
        ),
        7,
    )
    assert cache_of(config).capacity_fraction == 0.1


def test_a_task_chooses_model_and_loss_unless_they_are_given():
    config = resolved(["task=node"])
    assert (config.model_name, config.loss_name) == ("graphsage", "classes")
    config = resolved(["task=node", "model=gcn", "loss=bce"])
    assert (config.model_name, config.loss_name) == ("gcn", "bce")
    assert (resolved([]).model_name, resolved([]).loss_name) == ("wdl", "bce")
    config = resolved(["data=kg_synthetic", "model=rotate", "model.gamma=2.5"])
    assert (config.task._target_.split(".")[2], config.loss_name, config.model.gamma) == ("link", "softmax", 2.5)
    for wrong in ("model.gamma=much", "model.gamma=true", "model.gamma=1e30", "model.dropout=1"):
        with pytest.raises(UserError, match=wrong.split("=")[0]):
            resolved(["data=kg_synthetic", "model=rotate", wrong])


@pytest.mark.parametrize("setting", ["eval.patience=3", "checkpoint.best=auc"])
def test_what_follows_a_metric_needs_evaluations_during_training(setting):
    with pytest.raises(UserError, match=f"settings: {setting} needs evaluations during training: set eval.every_steps"):
        resolved([setting])
    assert resolved([setting, "eval.every_steps=5"]).eval.every_steps == 5


def test_a_cache_is_there_by_default_where_it_can_pay():
    assert cache_of(resolved([])).capacity_fraction == 0
    assert cache_of(resolved(["table.staleness=null"])).capacity_fraction == 0.1
    assert cache_of(resolved(["table.staleness=5", "table.cache.capacity_rows=9"])).capacity_rows == 9
    assert cache_of(resolved(["table.cache.capacity_fraction=0"])).capacity_fraction == 0


@pytest.mark.parametrize("size", ["capacity_rows=9", "capacity_fraction=0.1"])
def test_a_cache_at_staleness_0_is_refused(size):
    with pytest.raises(
        UserError, match="^settings: table.cache.capacity_.* must be 0 at table.staleness=0, .*leave it"
    ):
        resolved([f"table.cache.{size}"])
    name, value = size.split("=")
    with pytest.raises(UserError, match=f"^table t: table.cache.{name} must be 0 at table.staleness=0"):
        cache_of(resolved([]), "table t", {name: json.loads(value)})


def test_learning_rates_left_open_follow_the_rule():
    config = resolved(["optim.rows=adam", "optim.dense=sgd"])
    assert (config.optim.rows_lr, config.optim.dense_lr) == (0.001, 0.1)
    assert resolved(["optim.rows=adam", "optim.rows_lr=0.5"]).optim.rows_lr == 0.5
    assert resolved(["optim.rows_lr=1e3"]).optim.rows_lr == 1e3


OWN = [{}, {"rows": "ftrl"}, {"rows": "ftrl", "rows_l1": 1}, {"rows_weight_decay": 0.5}, {"rows_momentum": 0}]


@pytest.mark.parametrize("own", OWN)
def test_a_table_has_the_optimizer_of_the_settings_and_of_its_own(own):
    values = dict(zip(OWN_OPTIM, ("momentum", 0.3, 0.01, 0.8)))
    schedule = Schedule("cosine", total_steps=9)
    found = optimizer_of(resolved([f"optim.{name}={value}" for name, value in values.items()]), "t", own, schedule)
    if "rows" in own:  # the learning rate and the momentum of another rule would not fit
        values |= {"rows_lr": 0.02, "rows_momentum": None}
    rule, lr, weight_decay, momentum, *l1 = (values | own).values()
    assert found == RowOptimizer(rule, lr, weight_decay, schedule=schedule, momentum=momentum, l1=sum(l1))


def test_settings_of_another_rule_are_refused():
    with pytest.raises(UserError, match="t: optim.rows_l1=0.5 needs optim.rows=ftrl, which is adagrad"):
        optimizer_of(resolved(["optim.rows_l1=0.5"]), "t", {}, Schedule())
    with pytest.raises(UserError, match="t: optim.rows_momentum=0.5 needs optim.rows=momentum, which is sgd"):
        optimizer_of(resolved([]), "t", {"rows": "sgd", "rows_momentum": 0.5}, Schedule())


def test_the_seed_reaches_the_data():
    assert resolved(["seed=11"]).data.seed == 11


def test_the_run_folder_names_model_and_data():
    folder = Path(resolved(["model=dcn"]).run.dir)
    assert folder.parent.name == "runs" and folder.name.endswith("-dcn-synthetic")


def test_jobs_that_start_in_one_second_have_folders_of_their_own():
    names = set()
    for _ in range(3):
        config = resolved([])
        assert config.checkpoint.dir == f"{config.run.dir}/checkpoints"
        names |= {config.run.dir, str(Path(planned(["seed=1"], None)[0].folder).parent)}
    assert len(names) == 6


@pytest.mark.parametrize(
    "override",
    [
        "nonsense",
        "steps=null epochs=null",
        "steps=2.5",
        "seed=1.5",
        "batch_size=1.5",
        "table.dim=wide",
        "table.init_std=x",
        "optim.rows_lr=x",
        "optim.dense_lr=-1",
        "optim.schedule=step",
        "eval.max_samples=0",
        "log.every_steps=0",
        "checkpoint.every_steps=null",
        "optim.warmup_steps=-1",
        "epochs=-1",
        "epochs=nan",
        "table.batches_per_pull=-1",
        "table.batches_per_pull=5",
        "table.staleness=-1",
        "table.staleness=1.5",
        "table.staleness=2147483648",
        "+table.cache.size=5",
        "train.profile=maybe",
        "table.anticipate=-1",
        "table.drift=-1",
        "table.drift=inf",
        "table.cache.policy=fifo",
        "table.exchange=mail",
        "table.cache.admit=some",
        "table.cache.capacity_rows=-1",
        "table.cache.capacity_fraction=1.5",
        "table.cache.capacity_rows=5 table.cache.capacity_fraction=0.1",
        "seed=99999999999999999999",
        "run.dir=/tmp/ü",
        "steps=99999999999999999999",
        "table.dim=100000000000",
        "table.init_std=inf",
        "optim.rows_lr=inf",
        "watchdog.seconds=inf",
        "eval.patience=0",
        "eval.patience=2",
        "eval.every_steps=5 eval.patience=many",
        "eval.every_steps=5 eval.metric=''",
        "eval.every_steps=0 checkpoint.best=auc",
        "eval.every_steps=5 checkpoint.best=''",
        "optim.rows_momentum=1",
        "optim.rows_momentum=-0.1",
        "optim.rows_l1=-1",
        "optim.rows_l2=x",
        "optim.dense_clip_norm=0",
        "optim.dense_clip_norm=x",
        "table.init_from=5",
        "checkpoint.dir=5",
        "checkpoint.dir=null",
        "checkpoint.dir=[1,2]",
        "run.dir=1e11",
        "run.dir=''",
        "resume=5",
        "resume=true",
        "model.hidden=[0]",
        "model.hidden=[a]",
        "model.hidden=[100000000000]",
        "model.hidden=2.5",
        "model.hidden=null",
        "model=gcn model.input_norm=1",
        "model=gcn model.input_dropout=1",
        "model=dcn model.num_cross_layers=-1",
        "model=dcn model.num_cross_layers=1001",
        f"model.hidden=[{','.join(['1'] * 1001)}]",
        f"data={'{a:' * 300}1{'}' * 300}",
        f"seed={'[' * 1000}{']' * 1000}",
        f"checkpoint.at_end={'x' * 3000}",
        "/@model=5",
        "model=finalmlp model.first_context=[-1]",
        "model=finalmlp model.gate=[0]",
        "table=null",
        "checkpoint=abc",
        "train=null",
        "table.cache=5",
        "run=null",
    ],
)
def test_settings_no_run_can_have_are_refused(override):
    with pytest.raises(UserError, match="^settings: ") as error:
        resolved(override.split())
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("value", ["1", "1.5", "-0.1", "nan", "true", "null", "half", "[0.5]"])
def test_a_dropout_no_model_can_have_is_refused(value):
    with pytest.raises(UserError, match="^settings: model.dropout must be a number from 0 to below 1, got "):
        resolved(["model=dnn", f"model.dropout={value}"])


@pytest.mark.parametrize("name", ["..", "a..b", ".a", "1.b", "a b", "a\n", "", 5])
def test_what_cannot_name_a_class_is_refused(name):
    with pytest.raises(UserError, match="^_target_ must name a class, as package.module.Class, got "):
        make(OmegaConf.create({"_target_": name}))


def test_a_model_that_no_memory_holds_is_refused_before_it_is_taken():
    config = resolved(["model=dnn", "model.hidden=[1000000,1000000]"])
    with pytest.raises(
        UserError, match=r"^settings: model=dnn needs 8,0\d\d.\d GB of memory, .* are free: lower table.dim"
    ):
        check_model_fits(config, {"num_fields": 2, "num_dense": 1, "dim": 4})


@pytest.mark.parametrize("override", ["model.dropout=0", "model.dropout=0.99", "model.batch_norm=true"])
@pytest.mark.parametrize("model", sorted(set(CLICK_MODELS) - {"lr", "fm"}))
def test_every_model_with_an_mlp_takes_dropout_and_batch_normalisation(model, override):
    assert resolved([f"model={model}", override]).model_name == model


def test_a_refusal_shows_the_begin_of_a_long_value():
    config = OmegaConf.create({"_target_": "hetmpi.data.triples.synthetic.SyntheticTriples", "seed": 0})
    with pytest.raises(UserError, match=r"^data.kind must be bilinear or translation, got x+\.\.\.$") as refused:
        make(config, kind="x" * 5000)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("override", ["model.batch_norm=1", "model.batch_norm=null", "model=dcnv2 model.stacked=0.5"])
def test_a_flag_of_a_model_is_true_or_false(override):
    with pytest.raises(UserError, match=r"^settings: model\.\w+ must be true or false, got"):
        resolved(override.split())


@pytest.mark.parametrize(
    ("override", "kind"),
    [("model.gate=10", "a list"), ("model.first=null", "a list"), ("model.num_heads=[2]", "a number")],
)
def test_a_list_in_place_of_a_number_and_the_reverse_are_refused(override, kind):
    with pytest.raises(UserError, match=rf"^settings: model\.\w+ must be {kind}, got"):
        resolved(["model=finalmlp", override])


@pytest.mark.parametrize("setting", [one for one in declared() if one.kind in (int, float)], ids=lambda one: one.key)
def test_a_number_has_a_range_that_a_run_can_have(setting):
    assert setting.most < LARGEST or setting.key == "seed"
    for value in (-1, 1e30, 10**30):
        with pytest.raises(UserError, match=f"^{setting.key} must be "):
            check_value(setting, setting.kind(value))
    for value in (setting.least, setting.most):
        check_value(setting, setting.kind(value))


@pytest.mark.parametrize("key, removed", REMOVED.items())
def test_a_removed_setting_is_named_with_the_reason(key, removed, tmp_path):
    (tmp_path / "experiment").mkdir()
    group, name = key.rsplit(".", 1)
    (tmp_path / "experiment/old.yaml").write_text(f"# @package _global_\n{group}: {{{name}: 5}}\n")
    for overrides in ([f"{key}=5"], [f"+{key}=5"], ["experiment=old"]):
        with pytest.raises(UserError, match=f"^settings: {key} was removed, as {removed.why}: leave it out"):
            resolved(overrides, str(tmp_path))


@pytest.mark.parametrize("former, now", FORMER_NAMES.items())
def test_a_former_name_of_a_transport_is_accepted_with_one_warning(former, now, tmp_path, capsys):
    current_name.cache_clear()
    for _ in range(2):
        assert resolved([f"table.exchange={former}"]).table.exchange == now
    assert capsys.readouterr().err == f"hetmpi: table.exchange={former} is now called {now}\n"
    (tmp_path / "0").mkdir()
    settings = OmegaConf.to_container(resolved([f"run.dir='{tmp_path}/0'"]))
    settings["table"]["exchange"] = former
    (tmp_path / "0/config.yaml").write_text(OmegaConf.to_yaml(settings))
    assert len(planned([f"run.dir='{tmp_path}'", f"table.exchange={now}"], None)) == 1


def test_an_integer_written_as_a_float_is_told_how_to_write_it():
    with pytest.raises(UserError, match="batch_size must be an integer of at least 1, got 10000000.0: write 10000000,"):
        resolved(["batch_size=1e7"])


def test_the_page_of_settings_is_up_to_date_and_short():
    written, text = runpy.run_path(str(ROOT / "tools/settings_page.py")), SETTINGS_PAGE.read_text()
    assert text == written["page"](), "run python tools/settings_page.py"
    assert len(text.splitlines()) < 200


def test_the_page_has_each_setting_once_and_no_other():
    rows = re.findall(r"^\| `([^`=]+)=([^`]+)`[^|`]* \| ", SETTINGS_PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((setting.key, setting.default_text) for setting in declared())


@pytest.mark.parametrize("group", PARTS)
def test_the_page_has_the_keys_of_each_kind_and_no_other(group):
    text = SETTINGS_PAGE.read_text()
    rows = text.partition(f"\n| `{group}=` | ")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {name: set(re.findall(rf"`({group}\.\w+)=", row)) for row in rows for name in names_in(row)}
    explained = {key for row in rows for key in re.findall(rf"`({group}\.\w+)`: ", row)}
    following = set(re.findall(rf"`({group}\.\w+)=", text.partition("\n## For experts\n")[2]))
    own = {path.stem: {f"{group}.{key}" for key in keys_of(path)} for path in (CONF / group).glob("*.yaml")}
    assert shown == {name: keys - following for name, keys in own.items()}
    assert explained | following <= set().union(*own.values())


def names_in(row):
    """The names in the first cell of a row."""
    return re.findall(r"`(\w+)`", row.split(" | ")[0])


def keys_of(path):
    return set(OmegaConf.load(path)) - {"_target_", "defaults"}


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.stem}={path.stem}")
def test_comments_in_conf_are_short_and_each_key_of_a_kind_has_one(path):
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120 and sum(line.startswith("#") for line in lines) <= 2
    if path.parent.stem in PARTS:
        follows = re.compile(r"\w+: [$]{[\w.]+}")  # a setting
        own = [line for line in lines if line.split(":")[0] in keys_of(path) and not follows.fullmatch(line)]
        assert [line for line in own if "  # " not in line] == []


def test_help_names_every_setting_with_its_default():
    text = " ".join(help_text(None).split())
    for setting in declared():
        assert f" {setting.key} {setting.help} [" in text and f"; default {setting.default_text}]" in text
    assert "integer from 1 to 1,073,741,824; default 64]" in text
    assert "complex | dcn | dcnv2 | deepfm | din | distmult | dlrm | dnn | finalmlp | fm | gat | gcn" in text


def test_the_folders_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lists = planned(["model.hidden=[64,64],[32,32]", r"run.dir='a\b, c=\'d\''"], None)
    assert [point.folder for point in lists] == [
        r"a\b, c='d'/0-model.hidden=[64,64]", r"a\b, c='d'/1-model.hidden=[32,32]",
    ]  # fmt: skip
    assert planned(["seed=3", "++run.dir=q"], None)[0].folder == "q/0"
    [one, _] = planned(["seed=1,2", "hydra.sweep.dir=runs/${seed}x"], None)
    assert one.folder == "runs/1x/0-seed=1"
    for wrong in (["run.dir=a,b"], ["run.dir=null"], ["seed=1,2", "checkpoint.dir=one"]):
        with pytest.raises(UserError):
            planned(wrong, None)


@pytest.mark.parametrize("drift, costs", [(0, True), (0.5, False)])
def test_a_large_bound_without_a_limit_of_drift_costs_accuracy(drift, costs):
    advice = staleness_of(resolved(["table.staleness=100", f"table.drift={drift}"])).advice
    assert (advice is not None) == costs


def test_a_setting_that_is_newer_than_a_run_counts_as_its_default(tmp_path):
    (tmp_path / "0").mkdir()
    settings = OmegaConf.to_container(resolved([f"run.dir='{tmp_path}/0'"]))
    del settings["table"]["batches_per_pull"]
    (tmp_path / "0/config.yaml").write_text(OmegaConf.to_yaml(settings))
    base = f"run.dir='{tmp_path}'"
    for same in ([], ["table.batches_per_pull=null"]):
        assert len(planned([base, *same], None)) == 1
    with pytest.raises(UserError, match="holds a run with other settings"):
        planned([base, "table.batches_per_pull=2"], None)


def test_a_removed_setting_of_a_run_counts_unless_it_had_no_effect(tmp_path):
    (tmp_path / "0").mkdir()
    settings = OmegaConf.to_container(resolved([f"run.dir='{tmp_path}/0'"]))
    for key, removed in REMOVED.items():
        group, name = key.rsplit(".", 1)
        for value in (removed.default, 5):
            before = {**settings, group: {**settings[group], name: value}}
            (tmp_path / "0/config.yaml").write_text(OmegaConf.to_yaml(before))
            if value == removed.default:
                assert len(planned([f"run.dir='{tmp_path}'"], None)) == 1
            else:
                with pytest.raises(UserError, match="holds a run with other settings"):
                    planned([f"run.dir='{tmp_path}'"], None)


@pytest.mark.parametrize("wrong", ["experiment=null", "model=broken", "model=glob(*)", "data.path=/x"])
def test_what_hydra_cannot_compose_is_one_line(tmp_path, monkeypatch, wrong):
    """Also beside files that are not hetmpi's."""
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/broken.yaml").write_text("a: [1")
    (tmp_path / "conf/hetmpi.yaml").write_text("mine: 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^settings: "):
        resolved([wrong]) if wrong != "model=glob(*)" else planned([wrong], None)
    with pytest.raises(UserError, match="did you mean table.dim?"):
        resolved(["tabel.dim=4"])


@pytest.mark.parametrize(
    "staleness, lines, most_keys, expected",
    [
        (19, 1000, 10, 1), (20, 1000, 10, 2), (1000, 1000, 10, 4), (None, 1000, 10, 4), (100, 35, 10, 3),
        (100, 5, 10, 1), (100, 0, 0, 1), (0, 0, 10, 1),
    ],
)  # fmt: skip
def test_a_round_serves_a_tenth_of_the_bound_as_far_as_the_cache_has_lines(staleness, lines, most_keys, expected):
    assert default_per_pull(staleness, lines, most_keys) == expected
