"""The problem of `bench step net=sage`: GraphSAGE on a synthetic graph of ogbn-mag's shape."""

from race.problem import Problem

NODES, EDGES, CLASSES, LISTS = 736_389, 5_416_271, 349, [(1_134_649, 10), (59_965, 10)]  # at scale 1


def settings_of(problem: Problem) -> list[str]:
    """Settings of the trainer."""
    scale = problem.scale
    lists = [[max(10, round(rows * scale)), most] for rows, most in LISTS]
    return [
        "data=graph_synthetic", f"data.nodes={round(NODES * scale)}", f"data.edges={round(EDGES * scale)}",
        f"data.classes={CLASSES}", f"data.lists={lists}", f"data.fanout={problem.fanout}",
        f"data.cache={problem.folder}", f"model.hidden={problem.dim}", "task.exact=false",
    ]  # fmt: skip
