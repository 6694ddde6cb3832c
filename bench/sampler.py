"""Times the sampler of neighbourhoods on a power-law graph, compared with the usual lines of numpy, and in threads.

    ./run.sh bench sampler [nodes=200000] [edges=5000000] [heads=1024] [fanouts=10,10] [threads=2] [repeats=50]

The numpy rule draws neighbours with replacement, hop by hop, and makes the nodes unique: it numbers no edges and its
batches cannot be repeated. First, with the hashes of the sampler as random numbers, it must find the same nodes. Then
both sides take turns on the same heads. In threads, each samples batches of its own. Medians.

Last, one JSON line: {"sampler_ms": a batch with replacement, "without_replacement_ms": x, "numpy_ms": x,
"numpy_vs_sampler": above 1: the sampler is faster, "speedup": batches per second in `threads` threads relative to one,
"nodes": nodes of a batch, "edges": sampled edges of a batch, "settings": {...}}.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from workload import parse

from hetmpi import _C
from hetmpi.data.synthetic import GOLDEN, base_of, mix, uniform

SETTINGS = {
    "nodes": 200_000, "edges": 5_000_000, "heads": 1024, "fanouts": [10, 10], "threads": 2, "repeats": 50,
}  # fmt: skip
LEAST = {name: (1, "for a batch") for name in SETTINGS if name != "fanouts"}
SEED, STREAM = 0, 0
EXPONENT = 2.2  # of the degrees' law


def main():
    """Compares results, then times batches."""
    settings = parse("sampler", SETTINGS, sys.argv[1:], LEAST)
    indptr, indices = graph_of(settings["nodes"], settings["edges"])
    rng, fanouts = np.random.default_rng(1), [int(fanout) for fanout in settings["fanouts"]]
    heads = [rng.integers(0, settings["nodes"], settings["heads"]) for _ in range(settings["repeats"])]

    def sample(number: int, replace: bool = True):
        positions = np.arange(settings["heads"]) + number // 4 * _C.SAMPLE_WINDOW  # in one window
        return _C.sample_neighbours(indptr, indices, heads[number], positions, fanouts, replace, SEED, STREAM)

    check(indptr, indices, heads[0], sample(0)[0], fanouts)
    calls = {
        "sampler_ms": sample,
        "without_replacement_ms": lambda number: sample(number, False),
        "numpy_ms": lambda number: drawn(
            indptr, indices, heads[number], fanouts, lambda nodes, k: rng.random(len(nodes))
        ),
    }
    times = np.array([[seconds_of(call, number) for call in calls.values()] for number in range(settings["repeats"])])
    result = dict(zip(calls, (1000 * np.median(times, axis=0)).tolist()))
    result["numpy_vs_sampler"] = float(np.median(times[:, 2] / times[:, 0]))
    result["speedup"] = speedup(sample, settings)
    nodes, blocks = sample(0)
    result |= {"nodes": len(nodes), "edges": sum(len(index) for _, index in blocks), "settings": settings}
    print(f"{result['nodes']:,} nodes and {result['edges']:,} edges a batch, in turns on one core")
    for name in calls:
        print(f"{name.removesuffix('_ms').replace('_', ' '):<24}{result[name]:8.2f} ms")
    print(f"{settings['threads']} threads: {result['speedup']:.2f} times the batches of one")
    print(json.dumps(result))


def graph_of(num_nodes: int, num_edges: int) -> tuple[np.ndarray, np.ndarray]:
    """indptr (num_nodes + 1,) int64 and indices (num_edges,) int32; both ends of an edge are drawn by a power law."""
    rng = np.random.default_rng(0)
    weight = np.cumsum(np.minimum((1 - rng.random(num_nodes)) ** (-1 / (EXPONENT - 1)), num_nodes / 10))
    first, second = (np.searchsorted(weight, rng.random(num_edges) * weight[-1]) for _ in range(2))
    sizes = np.bincount(first, minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(sizes)]), second[np.argsort(first, kind="stable")].astype(np.int32)


def drawn(indptr, indices, heads, fanouts, numbers) -> np.ndarray:
    """Nodes that the heads reach, ascending. numbers(nodes, k): numbers in [0, 1) for draw k of these nodes."""
    nodes = np.unique(heads)
    for fanout in fanouts:
        draws, ks = np.repeat(nodes, fanout), np.tile(np.arange(fanout), len(nodes))
        degrees = indptr[draws + 1] - indptr[draws]
        edges = indptr[draws] + (numbers(draws, ks) * degrees).astype(np.int64)
        nodes = np.unique(np.concatenate([nodes, indices[edges[degrees > 0]]]))
    return nodes


def check(indptr, indices, heads, nodes, fanouts):
    """Exits unless the sampler's nodes are those of numpy's rule with the sampler's hashes. Numbers of 53 bits may draw
    another edge than those of 64, once in 1e9 draws."""
    window = mix(base_of(SEED, STREAM))  # of number 0

    def numbers(drawn, k):
        return uniform(mix(mix(drawn.astype(np.uint64) * GOLDEN + window) + (k + 1).astype(np.uint64) * GOLDEN))

    expected = drawn(indptr, indices, heads, fanouts, numbers)
    if not np.array_equal(np.unique(nodes), expected):
        sys.exit(f"bench sampler: {len(nodes):,} nodes are not the {len(expected):,} of numpy's rule")


def speedup(sample, settings: dict) -> float:
    """Batches per second in `threads` threads relative to one thread, the median of three turns."""

    def seconds(threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return seconds_of(lambda _: list(pool.map(sample, range(settings["repeats"]))), None)

    return float(np.median([seconds(1) / seconds(settings["threads"]) for _ in range(3)]))


def seconds_of(call, argument) -> float:
    """Duration of call(argument) in seconds."""
    began = time.perf_counter()
    call(argument)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
