"""Triples: both layouts, names and their numbers, files that are damaged."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hetmpi.data.files import DataError
from hetmpi.data.triples.reading import PARTS, read_triples
from hetmpi.data.triples.source import HEAD, TAIL, KnownAnswers, TripleFiles
from hetmpi.data.triples.synthetic import SyntheticTriples
from hetmpi.data.triples.wordnet import WordNet
from hetmpi.errors import UserError
from hetmpi.tasks.link import LinkPrediction, SoftmaxLoss

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


@pytest.mark.parametrize("form", ["txt", "csv", "parquet"])
def test_blanks_around_names_are_no_part_of_them(tmp_path, form):
    rows = [["a ", " likes", "b"], [" b", "likes", " c d "]]
    if form == "parquet":
        pq.write_table(
            pa.table(dict(zip(("head", "relation", "tail"), map(list, zip(*rows))))), tmp_path / "train.parquet"
        )
    else:
        header = "head, relation, tail\n" if form == "csv" else ""
        text = header + "".join(("," if form == "csv" else "\t").join(row) + "\n" for row in rows)
        written(tmp_path, {f"train.{form}": text})
    found = read_triples(str(tmp_path), None)
    assert sorted(found.entities) == ["a", "b", "c d"] and found.relations == ["likes"]
    assert names_of(found, "train") == [["a", "likes", "b"], ["b", "likes", "c d"]]


def test_held_out_triples_that_are_trained_on_are_counted(tmp_path):
    source, lines = (
        TripleFiles(written(tmp_path, NAMES | {"test.txt": "a\tlikes\tb\nb\tlikes\ta\nb\tlikes\tc d\n"}), 0),
        [],
    )
    source.prepare(0, 1, lambda: None, lines.append)
    [line] = lines[1:]
    assert "2 of 3 test triples also stand in train" in line and "remove them from one of both" in line


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
        ({"test.txt": ""}, "test.txt has no triples: remove the file, if there are none"),
        ({"train.txt": ""}, "train.txt has no triples$"),
        ({"train.txt": "a\rx\tr\tb\n"}, "train.txt, line 1: a name has a line's end in it"),
        ({"train.txt": "Head\trelation\ttail\na\tr\tb\n"}, "train.txt, line 1 is a header: remove it"),
        ({"train.txt": "a\tr\tb\n".encode("utf-16")}, "train.txt is in UTF-16: convert it"),
        ({"valid2id.txt": "0\n"}, "has train.txt and valid2id.txt, of two layouts: remove those of one"),
        (
            DICTS | {"entities.dict": "a\t0\n"},
            "entities.dict, line 1: the number must be an integer of at least 0, got 'a'",
        ),
        (DICTS | {"entities.dict": f"{1 << 50}\ta\n"}, "line 1: the number .* is too large"),
        ({"train.tsv": "a\tr\tb\n"}, "both train.txt and train.tsv"),
        (DICTS | {"entities.dict": "0\ta\n1\tb\n"}, "train.txt, line 2: the entity 'c d' is not in entities.dict"),
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
        ({"train2id.txt": "1\n0 x 0\n"}, "line 2: the entity must be an integer of at least 0, got 'x'"),
        ({"train2id.txt": "1\n0 -1 0\n"}, "line 2: the entity must be an integer of at least 0, got '-1'"),
        ({"train2id.txt": "0\n"}, "train2id.txt has no triples"),
        ({"train2id.txt": ""}, "says None lines|is empty"),
        (
            {"train2id.txt": "0 1 0\n"},
            "line 1: the number of lines that follow must be an integer of at least 0, got '0 1 0'",
        ),
        ({"train.txt": "a\tr\tb\n"}, "has train.txt and train2id.txt, of two layouts"),
    ],
)
def test_damaged_numbers_are_refused_with_file_and_line(tmp_path, files, said):
    with pytest.raises(DataError, match=said):
        read_triples(written(tmp_path, NUMBERS | files), None)


def test_openkes_parts_may_be_empty_but_for_training(tmp_path):
    found = read_triples(written(tmp_path, NUMBERS | {"valid2id.txt": "0\n"}), None)
    assert len(found.parts["valid"]) == 0


def test_files_that_would_be_passed_over_are_refused(tmp_path):
    folder = written(tmp_path, {"train.txt": "a\tr\tb\n", "dev.txt": "a\tr\tb\n"})
    with pytest.raises(DataError, match="are in a file named valid: rename dev.txt, or remove it"):
        read_triples(folder, None)
    (tmp_path / "dev.txt").unlink()
    (tmp_path / "valid.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match="valid.txt"):
        read_triples(folder, None)


def test_a_folder_without_triples_and_wrong_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no train.txt"):
        read_triples(str(tmp_path), None)
    with pytest.raises(DataError, match="there is no such folder"):
        read_triples(str(tmp_path / "nowhere"), None)
    with pytest.raises(UserError, match="data.columns must be three names"):
        TripleFiles(str(tmp_path), 0, columns=["h", "t"])
    with pytest.raises(DataError, match="data.columns must be h, r and t"):
        TripleFiles(written(tmp_path, NAMES), 0, columns=["h", "t", "x"]).read()


def test_tables_with_named_columns_are_read_as_lines(tmp_path):
    expected = read_triples(written(tmp_path, NAMES), None)
    lines = {
        part: [line.split("\t") for line in (tmp_path / f"{part}.txt").read_text().split("\n") if line]
        for part in PARTS
    }
    for form, columns in (("parquet", None), ("csv", None), ("csv", ("s", "p", "o"))):
        folder = tmp_path / f"{form} {columns}"
        folder.mkdir()
        for part, rows in lines.items():
            table = pa.table(dict(zip(columns or ("head", "relation", "tail"), map(pa.array, zip(*rows)))))
            write = pq.write_table if form == "parquet" else pacsv.write_csv
            write(table.append_column("other", pa.array(range(len(rows)))), str(folder / f"{part}.{form}"))
        found = read_triples(str(folder), columns)
        for part in PARTS:
            assert names_of(found, part) == names_of(expected, part)
    integers = written_table(tmp_path / "numbers", {"head": [7, 5], "relation": [1, 1], "tail": [5, 7]})
    assert read_triples(integers, None).entities == ["7", "5"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.decimal128(22, 2), pa.string()])
def test_a_name_that_is_a_number_is_the_same_in_every_type(tmp_path, kind):
    columns = {"head": pa.array([3, 123456789012]).cast(kind), "relation": [1, 1], "tail": [5, 3]}
    assert read_triples(written_table(tmp_path / "kg", columns), None).entities == ["3", "123456789012", "5"]


def test_a_fourth_column_has_the_weights_of_the_training_triples(tmp_path):
    lines = written(tmp_path, {"train.txt": "a\tr\tb\t2\nb\tr\ta\t.5\n", "valid.txt": "a\tr\tb\n"})
    table = written_table(tmp_path / "kg", {"head": ["a"], "relation": ["r"], "tail": ["b"], "weight": [3]})
    assert read_triples(lines, None).weights.tolist() == [2, 0.5] and read_triples(table, None).weights.tolist() == [3]
    source = TripleFiles(lines, 0)
    said = []
    source.prepare(0, 1, lambda: None, said.append)
    assert "weights the training triples, from 0.5 to 2: remove it if it holds anything else" in said[1]
    samples = source.train(0, 2)
    by_head = dict(zip(samples.triples[:, 0].tolist(), samples.weights.tolist()))
    assert by_head == pytest.approx({0: 1.6, 1: 0.4})


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x", "", "1e-50", "\xff"])
def test_a_weight_must_be_a_number_above_0(tmp_path, weight):
    with pytest.raises(DataError, match="train.txt, line 2: the weight must be a number above 0, at most 1e.30, got "):
        read_triples(written(tmp_path, {"train.txt": f"a\tr\tb\t2\nb\tr\ta\t{weight}\n"}), None)


def names_of(triples, part):
    kinds = triples.entities, triples.relations, triples.entities
    return [[names[number] for names, number in zip(kinds, triple)] for triple in triples.parts[part].tolist()]


def written_table(folder, columns):
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "train.parquet")
    return str(folder)


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"head": ["a"], "tail": ["b"]}, "there must be one column relation, there are head, tail: name those"),
        ({"head": ["a", None], "relation": ["r", "r"], "tail": ["b", "a"]}, "row 2: column head is empty"),
        ({"head": [1, 2], "relation": ["r", "r"], "tail": [2.0, float("nan")]}, "row 2: column tail is empty"),
        ({"head": ["a", "a"], "relation": ["r", "r"], "tail": ["b", ""]}, "row 2: a name is empty"),
        ({"head": ["a", "b\nc"], "relation": ["r", "r"], "tail": ["b", "a"]}, "row 2: a name has a line's end"),
        ({"head": [["a"]], "relation": ["r"], "tail": ["b"]}, "column head: names were expected"),
        ({"head": [], "relation": [], "tail": []}, "has no triples"),
        (
            {"head": ["a"], "relation": ["r"], "tail": ["b"], "weight": [0.0]},
            "row 1: the weight must be a number above 0",
        ),
    ],
)
def test_damaged_tables_are_refused_with_file_and_row(tmp_path, columns, said):
    with pytest.raises(DataError, match=said):
        read_triples(written_table(tmp_path / "kg", columns), None)


@pytest.mark.parametrize("columns", [1.5, {"h": 1, "r": 2, "t": 3}, "hrt", ["h", "r"], ["h", "h", "t"]])
def test_columns_must_be_three_names(tmp_path, columns):
    with pytest.raises(UserError, match="data.columns must be three names"):
        TripleFiles(str(tmp_path), 0, columns=columns)


@pytest.mark.parametrize(
    "text, said",
    [
        ("head,relation,tail,weight,weight\na,r,b,1,1\n", "there are several columns weight"),
        ("head,relation,tail,\xff\na,r,b,1\n", "train.csv cannot be read: "),
        ("head,relation,tail\na,r,\xff\n", "train.csv"),
    ],
)
def test_a_damaged_csv_is_refused(tmp_path, text, said):
    with pytest.raises(DataError, match=said):
        read_triples(written(tmp_path, {"train.csv": text.encode("latin-1")}), None)


ROWS = [["a", "likes", "b"], ["b", "likes", "c d"], ["c d", "knows", "a"]]


@pytest.mark.parametrize(
    "name, between, settings",
    [
        ("train.txt", ";", {"delimiter": ";"}),
        ("train.txt", ",", {"delimiter": ","}),
        ("train.tsv", "\t", {"delimiter": "\\t"}),
        ("train.csv", ";", {"columns": ["h", "r", "t"]}),
        ("train.csv", ",", {"columns": ["h", "r", "t"]}),
        ("train.csv", "\t", {"columns": ["h", "r", "t"]}),
    ],
)
def test_delimiters_and_files_without_a_header_give_the_same_triples(tmp_path, name, between, settings):
    written(tmp_path, {name: "".join(between.join(row) + "\n" for row in ROWS)})
    for path in (tmp_path, tmp_path / name):
        assert names_of(TripleFiles(str(path), 0, **settings).read(), "train") == ROWS


def test_blanks_may_be_delimiters(tmp_path):
    path = written(tmp_path, {"train.txt": "a  likes\tb\nb likes c 0.5\n".replace(" 0.5", "")})
    found = TripleFiles(path, 0, delimiter=" ").read()
    assert names_of(found, "train") == [["a", "likes", "b"], ["b", "likes", "c"]]


def test_a_csv_with_the_headers_of_other_tools_needs_no_setting(tmp_path):
    for header in ("h;r;t", "subject;predicate;object"):
        path = written(tmp_path, {"train.csv": f"{header}\na;likes;b\n"})
        assert names_of(read_triples(path, None), "train") == [["a", "likes", "b"]]


@pytest.mark.parametrize(
    "files, said",
    [
        (
            {"train.txt": "a;likes;b\n"},
            "expected 3 columns, separated by tabs, got 1: it has ';' between values: set data.deli",
        ),
        ({"train.txt": "a likes b\n"}, "got 1: it has blanks between values: set data.delimiter=' '"),
        ({"train.csv": "a,likes,b\nb,likes,a\n"}, "there are a, likes, b: name those .*as data.columns=.h,r,t."),
        ({"train.nt": "<a> <b> <c>\n"}, "train.nt, line 1: <subject> <predicate> <object> . of N-Triples was expected"),
        ({"train.txt.gz": "x"}, "there is no train.txt, .*: there are train.txt.gz"),
    ],
)
def test_other_forms_are_refused_with_what_was_seen(tmp_path, files, said):
    with pytest.raises(DataError, match=said):
        read_triples(written(tmp_path, files), None)


@pytest.mark.parametrize(
    "text, name, columns, cure",
    [
        ("Head\tTail\tRelation", "train.tsv", None, "remove it, and set data.columns=.h,t,r."),
        ("head\ttail\trelation", "train.txt", ["h", "t", "r"], "remove it$"),
        ("subject\tpredicate\tobject", "train.txt", None, "remove it$"),
        ("head,tail,relation", "train.csv", ["h", "t", "r"], "leave out data.columns, or set it to the names"),
    ],
)
def test_headers_are_no_triples(tmp_path, text, name, columns, cure):
    line = "a,b,likes\n" if name.endswith("csv") else "a\tb\tlikes\n"
    path = written(tmp_path, {name: f"{text}\n{line}"})
    with pytest.raises(DataError, match=f"{name}, line 1 is a header: {cure}"):
        TripleFiles(path, 0, columns).read()


def test_relations_whose_names_differ_in_their_ends_have_metrics_of_their_own(tmp_path):
    names = [
        f"/government/politician/positions_held./government/{'government_position_held/' * 2}{end}" for end in "ab"
    ]
    source = TripleFiles(written(tmp_path, {"train.txt": "".join(f"a\t{name}\tb\n" for name in names)}), 0)
    source.prepare(0, 1, lambda: None, lambda line: None)
    found = LinkPrediction(source, SoftmaxLoss())._of_relations(np.array([0, 1]), np.array([[1, 1], [2, 2]]))
    assert found == {names[0]: 1, names[1]: 0.5}


def test_n_triples_are_read(tmp_path):
    text = """# a comment
<http://x/a> <http://x/likes> <http://x/b> .
_:n1 <http://x/likes> <http://x/\\u00e9> . # further
<http://x/b> <http://x/name> "B \\"b\\" c"@en .
<http://x/b> <http://x/age> "5"^^<http://x/int>.
"""
    found = read_triples(written(tmp_path, {"train.nt": text}), None)
    assert names_of(found, "train") == [
        ["http://x/a", "http://x/likes", "http://x/b"],
        ["_:n1", "http://x/likes", "http://x/\u00e9"],
        ["http://x/b", "http://x/name", '"B \\"b\\" c"@en'],
        ["http://x/b", "http://x/age", '"5"^^<http://x/int>'],
    ]


def test_one_file_is_divided_so_that_all_held_out_names_are_trained(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        f"e{h}\te{t}\tr{r}\t{w}\n"
        for h, r, t, w in np.c_[rng.integers(60, size=(800, 2)), rng.integers(1, 9, (800, 2))][:, [0, 2, 1, 3]]
    ]
    path = written(tmp_path, {"all.txt": "".join([*rows, *rows[:50]])}) + "/all.txt"
    source, other = (TripleFiles(path, seed, columns=["h", "t", "r"], held_out=0.1) for seed in (1, 2))
    with pytest.raises(UserError, match="data.held_out must be at most 0.4"):
        TripleFiles(path, 1, held_out=0.5)
    found = source.read()
    train, valid, test = (set(map(tuple, found.parts[part].tolist())) for part in PARTS)
    whole = set(map(tuple, TripleFiles(path, 1, columns=["h", "t", "r"]).read().parts["train"].tolist()))
    assert train | valid | test == whole and len(train) + len(valid) + len(test) == len(whole)
    assert len(valid) == len(test) == len(whole) // 10 and len(found.weights) == len(found.parts["train"])
    for side in range(3):
        ends = {triple[side] for triple in train} | ({triple[2 - side] for triple in train} if side != 1 else set())
        assert {triple[side] for triple in valid | test} <= ends
    assert (
        found.parts["valid"].tolist() == source.read().parts["valid"].tolist() != other.read().parts["valid"].tolist()
    )
    with pytest.raises(UserError, match="at most 0.000 can be held out"):
        TripleFiles(written(tmp_path, {"few.txt": "a\tr\tb\nc\tr\td\ne\tr\tf\n"}) + "/few.txt", 1, held_out=0.34).read()
    with pytest.raises(UserError, match="has a part valid: leave data.held_out out"):
        TripleFiles(written(tmp_path, NAMES), 1, held_out=0.1).read()


def test_a_file_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(DataError, match="train.parquet cannot be read: "):
        read_triples(written(tmp_path, {"train.parquet": b"PAR1 nonsense"}), None)


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


WORDS = {
    "data.noun": "  1 a licence\n00000010 03 n 02 dog 0 hound 0 002 @ 00000020 n 0000 ! 00000030 v 0101 | a dog\n"
    "00000020 03 n 01 animal 0 001 ~ 00000010 n 0000 | gloss\n",
    "data.verb": "00000030 29 v 01 bark 0 000 01 + 02 00 | to bark\n",
    "data.adj": "00000040 00 s 01 doggy 0 001 & 00000050 s 0000 | like a dog\n"
    "00000050 00 a 01 tame 0 001 & 00000040 a 0000 | not wild\n",
    "data.adv": "00000060 02 r 01 tamely 0 001 \\\\ 00000050 a 0101 | so\n".replace("\\\\", "\\"),
}


def test_wordnet_has_each_pointer_once_and_synsets_by_word_part_and_place(tmp_path):
    found = WordNet(written(tmp_path, WORDS), 0, held_out=0.2).read()
    triples = {tuple(triple) for part in PARTS for triple in names_of(found, part)}
    assert triples == {
        ("dog.n.00000010", "hypernym", "animal.n.00000020"), ("dog.n.00000010", "antonym", "bark.v.00000030"),
        ("doggy.a.00000040", "similar_to", "tame.a.00000050"), ("tame.a.00000050", "similar_to", "doggy.a.00000040"),
        ("tamely.r.00000060", "pertainym", "tame.a.00000050"),
    }  # fmt: skip
    assert len(found.entities) == 6 and [len(found.parts[part]) for part in PARTS] == [3, 1, 1]


@pytest.mark.parametrize(
    "line, said",
    [
        ("00000010 03 n 01 dog 0 001 @ 00000099 n 0000 | x", "data.noun, line 1: there is no synset '00000099'"),
        ("00000010 03 n 01 dog 0 002 @ 00000010 n 0000 | x", "line 1: this is no synset"),
        ("00000010 03 n 01 dog 0 001 ? 00000010 n 0000 | x", "line 1: this is no synset"),
        ("nonsense", "line 1: this is no synset of WordNet's data files: 'nonsense'"),
    ],
)
def test_a_damaged_wordnet_is_refused_with_file_and_line(tmp_path, line, said):
    with pytest.raises(DataError, match=said):
        WordNet(written(tmp_path, {name: "" for name in WORDS} | {"data.noun": f"{line}\n"}), 0).read()


def test_a_missing_wordnet_says_what_to_install(tmp_path):
    with pytest.raises(DataError, match="there is no data.noun: install Debian's package wordnet-base"):
        WordNet(f"{tmp_path}/none", 0).read()


def test_triples_are_visited_and_divided_as_the_page_states(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs/knowledge_graphs.md").read_text()
    table = page.split("| what | how |")[1].split("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == ["training triples", "negatives", "held-out triples", "files and rows"]
    path = written(tmp_path, {"all.txt": "".join(f"e{i % 7}\tr\te{i % 5}\n" for i in range(70))}) + "/all.txt"
    first, second = (TripleFiles(path, seed, held_out=0.1) for seed in (1, 2))
    for source in (first, second):
        source.prepare(0, 1, lambda: None, lambda line: None)
        epochs = [source.train(e * source.num_train, (e + 1) * source.num_train).triples for e in range(2)]
        assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist()) == sorted(source.parts["train"].tolist())
        assert epochs[0].tolist() != epochs[1].tolist()
        assert len(source.parts["valid"]) == len(source.parts["test"]) == 3  # of 35 distinct ones
        assert source.num_train == 2 * (35 - 6)
    assert first.parts["valid"].tolist() != second.parts["valid"].tolist()
