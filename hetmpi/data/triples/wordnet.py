"""WordNet: the synsets of WordNet's database files (wndb(5WN)) and the pointers between them.

An entity is called by its first word, its part of speech and its place in the file, as dog.n.02084071. Of two pointers
that are each other's inverse, such as hypernym and hyponym, one is read; symmetric ones are in both directions, as in
WN18RR. Pointers between words count as pointers between their synsets.
"""

from __future__ import annotations

import os

import numpy as np

from hetmpi.bounded_file import shown
from hetmpi.data.files import DataError, absolute
from hetmpi.data.triples.lines import lines_of, text_of
from hetmpi.data.triples.reading import Triples
from hetmpi.data.triples.source import TripleData
from hetmpi.errors import UserError, check_number

FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}  # part of speech -> file
RELATIONS = {
    "@": "hypernym", "@i": "instance_hypernym", "%m": "member_meronym", "%s": "substance_meronym",
    "%p": "part_meronym", "=": "attribute", "+": "derivationally_related_form", ";c": "domain_topic",
    ";r": "domain_region", ";u": "domain_usage", "*": "entailment", ">": "cause", "^": "also_see", "$": "verb_group",
    "&": "similar_to", "<": "participle_of_verb", "\\": "pertainym", "!": "antonym",
}  # fmt: skip
INVERSES = {"~", "~i", "#m", "#s", "#p", "-c", "-r", "-u"}
INSTALL = "install Debian's package wordnet-base (apt-get install wordnet-base), or give data.path"


class WordNet(TripleData):
    """See above and TripleData. Valid and test are drawn from all triples by the seed."""

    name = "wordnet"

    def __init__(self, path: str, seed: int, held_out: float = 0.01):
        """path: folder of data.noun, data.verb, data.adj and data.adv. held_out: share of the triples of valid, and of
        test."""
        super().__init__(seed)
        if not isinstance(path, str) or not path:
            raise UserError(f"data.path must be a path, got {path!r}")
        check_number("data.held_out", held_out, 0, 0.4)
        self.path, self.held_out = path, held_out

    def files(self) -> list[str]:
        return [os.path.join(absolute(self.path), file) for file in FILES.values()]

    def read(self) -> Triples:
        folder, found = absolute(self.path), []
        numbers: dict[tuple[str, bytes], int] = {}
        names: list[str] = []
        for part, file in FILES.items():
            path = os.path.join(folder, file)
            if not os.path.exists(path):
                raise DataError(f"data.path={shown(folder)}: there is no {file}: {INSTALL}")
            for place, line in lines_of(path):
                if line.startswith(b"  "):  # of the licence
                    continue
                offset, word, pointers = parsed(line, place)
                numbers[part, offset] = len(names)
                found += [(len(names), relation, target, place) for relation, target in pointers]
                names.append(f"{word}.{part}.{offset.decode()}")
        kinds = {name: number for number, name in enumerate(RELATIONS.values())}
        triples = np.empty((len(found), 3), np.int64)
        for i, (head, relation, target, place) in enumerate(found):
            if target not in numbers:
                raise DataError(f"{place}: there is no synset {text_of(target[1])}")
            triples[i] = head, kinds[relation], numbers[target]
        if len(triples) < 3:
            raise DataError(f"data.path={shown(folder)} has {len(triples)} pointers between synsets")
        triples = np.unique(triples, axis=0)
        triples = triples[np.random.default_rng((self.seed, len(triples))).permutation(len(triples))]
        cut = int(self.held_out * len(triples))
        parts = {"valid": triples[:cut], "test": triples[cut : 2 * cut], "train": triples[2 * cut :]}
        return Triples(parts, names, list(kinds))


def parsed(line: bytes, place: str) -> tuple[bytes, str, list[tuple[str, tuple[str, bytes]]]]:
    """The offset of a synset, its first word, and its pointers: relation, and part of speech and offset of the
    target. Raises DataError."""
    values = line.split(b" | ", 1)[0].split()
    try:
        offset, word, num_words = values[0], values[4].decode(), int(values[3], 16)
        begin = 4 + 2 * num_words
        num_pointers = int(values[begin])
        fields = values[begin + 1 : begin + 1 + 4 * num_pointers]
        pointers = []
        for i in range(num_pointers):
            symbol, target, part, _ = fields[4 * i : 4 * i + 4]
            if symbol.decode() not in INVERSES:
                pointers.append((RELATIONS[symbol.decode()], ({"s": "a"}.get(part.decode(), part.decode()), target)))
        if not offset.isdigit() or not word:
            raise ValueError
    except (ValueError, IndexError, KeyError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{place}: this is no synset of WordNet's data files: {text_of(line[:60])}") from error
    return offset, word, pointers
