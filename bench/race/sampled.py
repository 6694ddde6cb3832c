"""The problems whose samples the contenders draw themselves: `bench step net=sage`, GraphSAGE on a synthetic graph of
ogbn-mag's shape, and net=complex, ComplEx on a synthetic knowledge graph."""

from race.problem import Problem

NODES, EDGES, CLASSES, LISTS = 736_389, 5_416_271, 349, [(1_134_649, 10), (59_965, 10)]  # at scale 1
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
    return [
        "data=kg_synthetic", f"data.entities={round(ENTITIES * problem.scale)}", f"data.relations={RELATIONS}",
        f"data.triples={TRIPLES}", "data.held_out=0.001", "model=complex", f"task.negatives={NEGATIVES}",
    ]  # fmt: skip
