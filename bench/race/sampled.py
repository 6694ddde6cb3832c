"""The problems whose samples the contenders draw themselves: `bench step net=sage`, GraphSAGE on a synthetic graph of
ogbn-mag's shape, and net=complex, ComplEx on a synthetic knowledge graph, above a million entities one of random
triples."""

from pathlib import Path

import numpy as np

from race.problem import Problem

NODES, EDGES, CLASSES, LISTS = 736_389, 5_416_271, 349, [(1_134_649, 10), (59_965, 10)]  # at scale 1
MOST_PLANTED = 1_000_000  # entities
ENTITIES, RELATIONS, TRIPLES, NEGATIVES = 400_000, 200, 200_000, 256  # entities at scale 1


def settings_of(problem: Problem) -> list[str]:
    """Settings of the trainer."""
    return {"sage": of_nodes, "complex": of_links}[problem.net](problem)


def of_nodes(problem: Problem) -> list[str]:
    scale = problem.scale
    lists = [[max(10, round(rows * scale)), most] for rows, most in LISTS]
    return [
        "data=graph_synthetic", f"data.nodes={round(NODES * scale)}", f"data.edges={round(EDGES * scale)}",
        f"data.classes={CLASSES}", f"data.lists={lists}", f"data.fanout={problem.fanout}",
        f"data.cache={problem.folder}", f"model.hidden={problem.dim}", "task.exact=false",
    ]  # fmt: skip


def of_links(problem: Problem) -> list[str]:
    common = ["model=complex", f"task.negatives={NEGATIVES}"]
    if round(ENTITIES * problem.scale) > MOST_PLANTED:
        return ["data=triples", f"data.path={problem.folder}", *common]
    return [
        "data=kg_synthetic", f"data.entities={round(ENTITIES * problem.scale)}", f"data.relations={RELATIONS}",
        f"data.triples={TRIPLES}", "data.held_out=0.001", *common,
    ]  # fmt: skip


def write_links(folder: str, scale: float):
    """Files of random triples, whose entities follow Zipf's law, if there are too many entities for planted ones."""
    num = round(ENTITIES * scale)
    if num <= MOST_PLANTED:
        return
    random = np.random.default_rng(0)
    for part, size in (("train", 5 * TRIPLES), ("valid", 100)):
        ranks = (1 + random.random((size, 2)) * (num**-0.05 - 1)) ** -20  # by the continuous law, exponent 1.05
        ends = (ranks.astype(np.int64) - 1) * 2654435761 % num
        lines = np.column_stack([ends, random.integers(RELATIONS, size=size)])
        np.savetxt(Path(folder, f"{part}2id.txt"), lines, fmt="%d", header=f"{size}", comments="")
    for kind, size in (("entity", num), ("relation", RELATIONS)):
        with open(Path(folder, f"{kind}2id.txt"), "w") as file:
            file.write(f"{size}\n")
            file.writelines(f"{kind[0]}{number}\t{number}\n" for number in range(size))
