"""Triples of a knowledge graph: (head, relation, tail), as numbers of entities and relations."""
