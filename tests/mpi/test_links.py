"""Links of a knowledge graph: equal to one process of torch at s = 0; ranks equal to those of all scores; resuming."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from link_runs import STEPS, Twin, all_scores, closed, evaluations, made, numpy_ranks, rows_of
from resumed import whole_and_resumed

from hetmpi.tasks import ranking
from hetmpi.tasks.link import ALL, relation_kinds
from hetmpi.tasks.ranking import ranks_of
from hetmpi.trained import link_answers
from hetmpi.trained.link_answers import LinkAnswers

pytestmark = pytest.mark.mpi
MODELS = {
    "complex": [], "distmult": ["model=distmult"], "rotate": ["model=rotate"], "transe1": ["model=transe"],
    "transe2": ["model=transe", "model.norm=2"], "rescal": ["model=rescal"], "simple": ["model=simple"],
    "complex reciprocal": ["task.reciprocal=true"], "transe1 reciprocal": ["model=transe", "task.reciprocal=true"],
}  # fmt: skip
# test_mrr, the same at any number of ranks; recorded at one.
MRR_OF_30_STEPS = 0.16911


@pytest.fixture
def folder(world, tmp_path):
    """A folder for all ranks."""
    return world.comm.bcast(tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_s_0_is_as_embeddings_of_torch_on_the_same_negatives(world, folder, model):
    training = made(folder, *MODELS[model], "checkpoint.at_end=false")
    twin = Twin(training, model)
    training.run()
    twin.check(closed(training), world)


def test_s_0_is_so_with_weights_a_penalty_and_filtered_negatives_by_degree(world, folder):
    how = ["task.penalty=0.02", "task.degree_share=0.5", "task.filtered=true", "checkpoint.at_end=false"]
    how += ["train.accumulate=3"]  # parts of a batch, which change rounding alone
    training = made(folder, *how)
    training.source._weights = np.random.default_rng(0).random(training.source.num_train, np.float32)
    twin = Twin(training, "complex")
    training.run()
    twin.check(closed(training), world)


def test_negatives_by_degree_come_as_often_as_in_training_triples(world, folder):
    training = made(folder, "task.degree_share=1", "task.negatives=4000", "checkpoint.at_end=false")
    drawn = np.bincount(training.task._drawn(0), minlength=90) / 4000
    expected = np.bincount(training.source.parts["train"][:, [0, 2]].reshape(-1), minlength=90)
    assert np.abs(drawn - expected / expected.sum()).max() < 0.01
    closed(training)


def test_local_negatives_are_of_the_own_shard(world, folder):
    training = made(folder, "task.local_negatives=true", "table.partition=hash", "checkpoint.at_end=false")
    own = set(training.tables["entity"].keys().tolist())
    drawn = np.concatenate([training.task._drawn(number) for number in range(60)])
    assert set(drawn.tolist()) == own
    training.run()
    closed(training)
    if world.rank == 0:
        assert len(evaluations(folder)) == 1


def test_relations_have_kinds_by_their_mean_numbers_of_heads_and_tails():
    of_one = [[0, 0, 1], [1, 0, 2], [0, 0, 1]]
    to_many, from_many = [[0, 1, tail] for tail in range(3)], [[head, 2, 0] for head in range(3)]
    both = [[head, 3, tail] for head in range(3) for tail in range(3)]
    assert relation_kinds(np.array(of_one + to_many + from_many + both), 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("are_apart", [False, True])
def test_ranks_are_those_of_all_scores_with_ties(world, folder, model, are_apart, monkeypatch):
    monkeypatch.setattr(ranking, "BLOCK_ROWS", 7)
    monkeypatch.setattr(ranking, "QUESTIONS", 11)
    apart = ["table.ranks_per_node=1"] if are_apart else []
    training = made(folder, *MODELS[model], *apart, "checkpoint.at_end=false", "table.partition=hash")
    table = training.tables["entity"]
    keys = table.keys().numpy()
    table.shard.assign(slice(None), weight=np.random.default_rng(0).integers(-1, 2, (30, 8))[keys % 30] / 2.0)
    for each in training.tables.values():
        each.resume_at(0)
    rows, triples = rows_of(training), training.source.parts["test"]
    training.model.eval()
    found = ranks_of(training.evaluation, triples, training.source.known(ALL), "for a test")
    known = np.concatenate(list(training.source.parts.values()))
    assert np.array_equal(found, numpy_ranks(model, rows, triples, known))
    assert (found % 1 > 0).any()  # ties
    closed(training)


@pytest.mark.parametrize("num", [1, 20, 90])
def test_ranks_among_some_entities_are_those_of_their_scores(world, folder, num, monkeypatch):
    monkeypatch.setattr(ranking, "BLOCK_ROWS", 7)
    monkeypatch.setattr(ranking, "QUESTIONS", 11)
    training = made(
        folder, "checkpoint.at_end=false", "table.partition=hash", "eval.every_steps=15", f"task.ranked_among={num}"
    )
    training.run()
    source, task, rows = training.source, training.task, closed(training)
    if world.rank == 0:
        among = task._some_entities()
        assert len(set(among.tolist())) == num and among.max() < 90
        known = np.concatenate([source.parts["train"], source.parts["valid"]])
        ranks = numpy_ranks("complex", rows, source.parts["valid"], known, among)
        last = json.loads((folder / "evaluation.jsonl").read_text().splitlines()[-1])
        assert last["sampled_mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-9) and last["sampled_mr"] <= num + 1
        assert "mrr" not in last
        known = np.concatenate(list(source.parts.values()))
        ranks = numpy_ranks("complex", rows, source.parts["test"], known)  # the test's are among all
        assert json.loads((folder / "summary.json").read_text())["test_mrr"] == pytest.approx(
            (1 / ranks).mean(), abs=1e-9
        )


@pytest.mark.parametrize("model", ["rotate", "complex reciprocal"])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_answers_are_the_best_of_all_scores_by_name(world, folder, model, leaves_out, monkeypatch):
    monkeypatch.setattr(link_answers, "BLOCK_ROWS", 7)
    monkeypatch.setattr(link_answers, "QUESTIONS", 4)
    monkeypatch.setattr(link_answers, "TOGETHER", 6)
    training = made(folder, *MODELS[model], "table.partition=hash")
    training.run()
    parts, rows = training.source.parts, closed(training)
    questions = [(side, *triple) for triple in parts["test"][:5].tolist() for side in (0, 1)]
    if world.rank == 0:
        lines = [
            f"{'?' if side == 0 else f'e{h}'}\tr{r}\t{f'e{t}' if side == 0 else '?'}\n" for side, h, r, t in questions
        ]
        (folder / "questions").write_text("".join(lines))
        (folder / "known").mkdir()
        known = [f"e{h}\tr{r}\te{t}\n" for h, r, t in parts["train"].tolist()]
        (folder / "known/train.txt").write_text("".join([*known, "unknown\tr0\te1\n"]))
    world.comm.Barrier()
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    answers = LinkAnswers(world, checkpoint, f"{folder}/known" if leaves_out else None)
    num = answers.write(f"{folder}/questions", folder / "out.parquet", 100)
    if world.rank > 0:
        return
    found, known = pq.read_table(folder / "out.parquet").to_pylist(), set(map(tuple, parts["train"].tolist()))
    assert num == 10
    for side, h, r, t in questions:
        scores = all_scores(model, rows, side, h, r, t)
        asked = "head" if side == 0 else "tail"
        question = {"asked": asked, "relation": f"r{r}", **({"tail": f"e{t}"} if side == 0 else {"head": f"e{h}"})}
        mine = [one for one in found if question.items() <= one.items()]
        left_out = {e for e in range(90) if ((e, r, t) if side == 0 else (h, r, e)) in known and leaves_out}
        entities = [int(one[asked][1:]) for one in mine]
        assert set(entities) == set(range(90)) - left_out and len(set(entities)) == len(entities)
        assert [one["rank"] for one in mine] == list(range(1, len(mine) + 1))
        assert np.allclose([one["score"] for one in mine], scores[entities], atol=1e-4)
        assert (np.diff([one["score"] for one in mine]) <= 0).all()


@pytest.mark.parametrize("model", ["rotate", "complex reciprocal"])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_relations_of_two_entities_and_scores_of_triples_are_those_of_all_scores(world, folder, model, leaves_out):
    training = made(folder, *MODELS[model])
    training.run()
    parts, rows = training.source.parts, closed(training)
    triples = parts["test"][:4].tolist()
    if world.rank == 0:
        lines = [f"e{h}\t?\te{t}\ne{h}\tr{r}\te{t}\n" for h, r, t in triples]
        (folder / "questions").write_text("".join([*lines, "e1\tr0\t?\n"]))
        (folder / "known").mkdir()
        (folder / "known/train.txt").write_text("".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in triples[:2]))
    world.comm.Barrier()
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    num_relations = len(rows["relation"])
    answers = LinkAnswers(world, checkpoint, f"{folder}/known" if leaves_out else None)
    assert answers.write(f"{folder}/questions", folder / "out.parquet", 5) == (9 if world.rank == 0 else 0)
    if world.rank > 0:
        return
    found = pq.read_table(folder / "out.parquet").to_pylist()
    for number, (h, r, t) in enumerate(triples):
        of_triple = {"head": f"e{h}", "tail": f"e{t}"}
        scores = np.array([all_scores(model, rows, 1, h, relation, t)[t] for relation in range(num_relations)])
        [given] = [one for one in found if one.items() >= {**of_triple, "relation": f"r{r}", "asked": "score"}.items()]
        assert given["score"] == pytest.approx(scores[r], abs=1e-4) and given["rank"] == 1
        best = [one for one in found if one.items() >= {**of_triple, "asked": "relation"}.items()]
        relations = [int(one["relation"][1:]) for one in best]
        expected = [one for one in np.argsort(-scores).tolist() if not (leaves_out and number < 2 and one == r)][:5]
        assert np.allclose(scores[relations], scores[expected], atol=1e-4) and len(set(relations)) == len(expected)
        assert np.allclose([one["score"] for one in best], scores[relations], atol=1e-4)
        assert [one["rank"] for one in best] == list(range(1, len(best) + 1))
        assert (r in relations) == (not leaves_out or number >= 2) or num_relations > 5
    assert [one["asked"] for one in found[-5:]] == ["tail"] * 5


def test_of_equal_scores_the_first_entities_are_the_best():
    best, scores = link_answers.Best(2, 4), torch.zeros(2, 1000)
    scores[0, 500], scores[1, 2] = 1, -torch.inf
    best.add(7, scores)
    best.add(0, torch.zeros(2, 3))
    assert best.entities.tolist() == [[507, 0, 1, 2], [0, 1, 2, 7]]


def test_a_score_that_is_nan_has_the_worst_rank(world, folder):
    training = made(folder, "checkpoint.at_end=false")
    table = training.tables["entity"]
    table.shard.assign(slice(None), weight=np.full((len(table.shard), 8), np.nan, np.float32))
    for each in training.tables.values():
        each.resume_at(0)
    training.model.eval()
    triples = training.source.parts["test"][:1]
    found = ranks_of(training.evaluation, triples, training.source.known(("test",)), "for a test")
    assert (found > 40).all()  # the mean rank of about 90 that are equal
    closed(training)


def test_the_run_ends_with_the_ranks_of_the_test_and_mrr_is_the_same_at_any_number_of_ranks(world, folder):
    training = made(folder, "checkpoint.at_end=false", "eval.every_steps=15")
    training.run()
    source, rows = training.source, closed(training)
    if world.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        known = np.concatenate(list(source.parts.values()))
        ranks = numpy_ranks("complex", rows, source.parts["test"], known)
        assert summary["test_mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-9)
        assert summary["test_hits_at_10"] == pytest.approx((ranks <= 10).mean(), abs=1e-9)
        sides = [summary["test_mrr_heads"], summary["test_mrr_tails"]]
        assert sides == pytest.approx((1 / ranks).mean(0), abs=1e-9)
        relations = source.parts["test"][:, 1]
        expected = {f"r{number}": (1 / ranks[relations == number]).mean() for number in np.unique(relations).tolist()}
        assert summary["test_mrr_of_relations"] == pytest.approx(expected, abs=1e-9)
        last = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()][-1]
        assert (last["mrr_heads"] + last["mrr_tails"]) / 2 == pytest.approx(last["mrr"])
        known = np.concatenate([source.parts["train"], source.parts["valid"]])
        ranks = numpy_ranks("complex", rows, source.parts["valid"], known)
        assert evaluations(folder)[STEPS] == pytest.approx((1 / ranks).mean(), abs=1e-9)
        assert summary["test_mrr"] == pytest.approx(MRR_OF_30_STEPS, abs=5e-5)


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(world, folder):
    settings = ["model.dropout=0.3", "model.relation_dropout=0.2"]
    whole, second = whole_and_resumed(made, closed, folder, settings, STEPS)
    rows, expected = closed(second), closed(whole)
    assert all(torch.equal(rows[name], expected[name]) for name in expected)


def test_at_s_10_with_logistic_loss_a_run_learns_and_ends(world, folder):
    how = ["table.staleness=10", "table.cache.admit=all", "table.cache.capacity_fraction=0.5", "table.ranks_per_node=1"]
    training = made(folder, *how, "loss=logistic", "checkpoint.at_end=false", "steps=90", "eval.every_steps=30")
    training.run()
    closed(training)
    if world.rank == 0:
        found = evaluations(folder)
        assert found[90] > found[30]


@pytest.mark.parametrize("staleness", [0, 10])
def test_the_learning_rate_falls_while_the_metric_stays_on_a_plateau(world, folder, staleness):
    how = ["optim.schedule=plateau", "optim.plateau_evals=1", "optim.plateau_decay=0.25", "eval.every_steps=3"]
    how += [f"table.staleness={staleness}", "optim.rows_lr=3", "log.every_steps=3", "checkpoint.at_end=false"]
    training = made(folder, *how)
    training.run()
    closed(training)
    if world.rank > 0:
        return
    best, expected = 0, {}
    rate = training.dense.lr
    for step, mrr in evaluations(folder).items():
        expected[step] = rate
        rate, best = (rate, mrr) if mrr > best else (0.25 * rate, best)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["lr"] for line in lines if "lr" in line} == pytest.approx(expected)
    assert min(expected.values()) < training.dense.lr


def test_the_best_checkpoint_is_that_of_the_best_mrr(world, folder):
    training = made(folder, "checkpoint.best=mrr", "eval.every_steps=10", "eval.patience=5")
    training.run()
    closed(training)
    if world.rank == 0:
        summary, found = json.loads((folder / "summary.json").read_text()), evaluations(folder)
        assert summary["best_mrr"] == max(found.values()) and (folder / "checkpoints/best").is_dir()


def test_the_negatives_of_a_position_do_not_depend_on_the_batch(world, folder):
    training = made(folder, "checkpoint.at_end=false")
    task, source = training.task, training.source
    [whole, part] = (task.batches(None)(source.train(*places)) for places in ((0, 24), (4, 15)))
    keys = {"whole": whole.keys["entity"], "part": part.keys["entity"]}
    assert [(chunk.begin, chunk.end) for chunk in part.chunks] == [(0, 2), (2, 8), (8, 11)]
    for a, b in zip(whole.chunks, part.chunks):
        assert torch.equal(keys["whole"][a.negatives], keys["part"][b.negatives])
    assert SimpleNamespace(**task.most_keys(11)).entity >= len(keys["part"])
    closed(training)
