"""Triples: both layouts, names and their numbers, files that are damaged."""

from pathlib import Path

import numpy as np
import pytest

from hetmpi.data.files import DataError
from hetmpi.data.triples.reading import read_triples
from hetmpi.data.triples.source import HEAD, TAIL, KnownAnswers, TripleFiles
from hetmpi.data.triples.synthetic import SyntheticTriples
from hetmpi.errors import UserError

WN18RR = Path(__file__).resolve().parents[3] / "shared/data/wn18rr"
NAMES = {"train.txt": "a\tlikes\tb\nb\tlikes\tc d\na\tlikes\tb\n", "valid.txt": "c d\tlikes\ta\n",
         "test.txt": "e\tknows\ta\r\n"}  # fmt: skip
NUMBERS = {"train2id.txt": "2\n0 1 0\n1 2 1\n", "valid2id.txt": "1\n2 0 0\n",
           "entity2id.txt": "3\na b\t0\nb\t1\nc\t2\n",
           "relation2id.txt": "2\nr\t0\ns\t1\n"}  # fmt: skip
DICTS = {"entities.dict": "1\ta\n0\tb\n2\tc d\n3\te\n", "relations.dict": "0\tknows\n1\tlikes\n"}


def written(folder, files):
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_names_are_numbered_as_they_appear_and_repeated_triples_kept(tmp_path):
    found = read_triples(written(tmp_path, NAMES), None)
    assert found.entities == ["a", "b", "c d", "e"] and found.relations == ["likes", "knows"]
    assert found.parts["train"].tolist() == [[0, 0, 1], [1, 0, 2], [0, 0, 1]]
    assert found.parts["valid"].tolist() == [[2, 0, 0]] and found.parts["test"].tolist() == [[3, 1, 0]]


def test_lists_of_names_give_the_numbers(tmp_path):
    found = read_triples(written(tmp_path, NAMES | DICTS), None)
    assert found.entities == ["b", "a", "c d", "e"]
    assert found.parts["train"].tolist() == [[1, 1, 0], [0, 1, 2], [1, 1, 0]]


def test_openke_has_the_relation_last(tmp_path):
    found = read_triples(written(tmp_path, NUMBERS), None)
    assert found.entities == ["a b", "b", "c"] and found.relations == ["r", "s"]
    assert found.parts["train"].tolist() == [[0, 0, 1], [1, 1, 2]] and len(found.parts["test"]) == 0


def test_columns_may_come_in_another_order(tmp_path):
    files = {"train.tsv": "likes\tb\ta\n"}
    found = TripleFiles(written(tmp_path, files), 0, columns=["r", "t", "h"]).read()
    assert [found.entities[i] for i in found.parts["train"][0, [0, 2]]] == ["a", "b"]


@pytest.mark.parametrize(
    "files, said",
    [
        ({"valid.txt": "a\tlikes\n"}, "valid.txt, line 1: expected 3 columns, separated by tabs, got 2"),
        ({"train.txt": "a\tr\tb\nb\tr\ta\t0.5\n"}, "train.txt, line 2: expected 3 columns, separated by tabs, got 4"),
        ({"test.txt": b"a\tlikes\t\xff\n"}, "test.txt, line 1: the name .* is not UTF-8"),
        ({"train.txt": "a\t\tb\n"}, "train.txt, line 1: a name is empty"),
        ({"test.txt": ""}, "test.txt has no triples"),
        ({"train.tsv": "a\tr\tb\n"}, "both train.txt and train.tsv"),
        (DICTS | {"entities.dict": "0\ta\n1\tb\n"}, "train.txt, line 2: the entity 'c d' is not in the list"),
        (DICTS | {"entities.dict": "0\ta\n2\tb\n"}, "the numbers must be 0 to 1, once each"),
        (DICTS | {"entities.dict": "0\ta\n1\ta\n"}, "entities.dict, line 2: the entity 'a' occurs twice"),
    ],
)
def test_damaged_names_are_refused_with_file_and_line(tmp_path, files, said):
    with pytest.raises(DataError, match=said):
        read_triples(written(tmp_path, NAMES | files), None)


@pytest.mark.parametrize(
    "files, said",
    [
        ({"train2id.txt": "2\n0 1 0\n1 3 1\n"}, "train2id.txt, line 3: the entity 3 is out of range, there are 3"),
        ({"train2id.txt": "1\n0 1 2\n"}, "line 2: the relation 2 is out of range, there are 2"),
        ({"train2id.txt": "3\n0 1 0\n1 2 1\n"}, "train2id.txt says 3 lines in its first line, it has 2"),
        ({"train2id.txt": "1\n0 x 0\n"}, "line 2: expected an integer of at least 0, got 'x'"),
        ({"train2id.txt": "1\n0 -1 0\n"}, "line 2: expected an integer of at least 0, got '-1'"),
        ({"train2id.txt": "0\n"}, "train2id.txt has no triples"),
        ({"train2id.txt": ""}, "says None lines|is empty"),
    ],
)
def test_damaged_numbers_are_refused_with_file_and_line(tmp_path, files, said):
    with pytest.raises(DataError, match=said):
        read_triples(written(tmp_path, NUMBERS | files), None)


def test_a_folder_without_triples_and_wrong_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no train.txt"):
        read_triples(str(tmp_path), None)
    with pytest.raises(DataError, match="there is no such folder"):
        read_triples(str(tmp_path / "nowhere"), None)
    with pytest.raises(UserError, match="data.columns must be h, r and t"):
        TripleFiles(str(tmp_path), 0, columns=["h", "t"])


def test_entities_without_a_training_triple_are_counted(tmp_path):
    source, told = TripleFiles(written(tmp_path, NAMES), 0), []
    source.prepare(0, 1, lambda: None, told.append)
    assert "without a training triple: 1 entities and 1 relations" in told[0]
    assert source.is_seen.tolist() == [True, True, True, False]


def test_the_stream_visits_each_triple_once_per_epoch(tmp_path):
    source = TripleFiles(written(tmp_path, NAMES), 7)
    source.prepare(0, 1, lambda: None, lambda line: None)
    whole = source.train(0, 9).triples
    for epoch in range(3):
        assert sorted(whole[3 * epoch : 3 * epoch + 3].tolist()) == sorted(source.parts["train"].tolist())
    assert np.array_equal(source.train(2, 7).triples, whole[2:7])


def test_known_answers_are_those_of_the_triples():
    triples = np.array([[0, 0, 1], [0, 0, 2], [0, 1, 1], [3, 0, 2], [0, 0, 1]])
    known = KnownAnswers(triples, 4)
    questions, answers = known.of(TAIL, np.array([0, 1, 0]), np.array([0, 0, 1]))
    assert list(zip(questions.tolist(), answers.tolist())) == [(0, 1), (0, 1), (0, 2), (2, 1)]
    questions, answers = known.of(HEAD, np.array([2]), np.array([0]))
    assert answers.tolist() == [0, 3]


@pytest.mark.parametrize("kind", ["bilinear", "translation"])
def test_planted_factors_rank_tails_without_noise_first(kind):
    source = SyntheticTriples(0, entities=50, relations=3, triples=400, kind=kind, noise=0.0)
    triples = source.read()
    assert source.best_mrr == 1 and sum(map(len, triples.parts.values())) == 400
    answers = {}
    for h, r, t in np.concatenate(list(triples.parts.values())).tolist():
        assert answers.setdefault((h, r), t) == t


def test_wn18rr_has_its_published_sizes():
    if not WN18RR.is_dir():
        pytest.skip("no shared/data/wn18rr beside the checkout")
    source = TripleFiles(str(WN18RR), 0)
    source.prepare(0, 1, lambda: None, lambda line: None)
    assert (source.num_entities, source.num_relations) == (40_943, 11)
    assert [len(part) for part in source.parts.values()] == [86_835, 3_034, 3_134]
    assert int((~source.is_seen[source.parts["test"][:, [0, 2]]].all(1)).sum()) == 210
