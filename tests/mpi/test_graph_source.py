"""A graph is prepared by one rank and read by all."""

import numpy as np
import pytest

from hetmpi.data.graph.synthetic import SyntheticGraph

pytestmark = pytest.mark.mpi
BATCH = 16


def opened(world, folder, **settings):
    """The source, and what its preparation printed on this rank."""
    source, lines = SyntheticGraph(2, nodes=2_000, edges=9_000, classes=5, cache=folder, fanout=[3, 3], **settings), []
    source.prepare(world.rank, world.size, lambda: world.meet("for the graph"), lines.append)
    return source, lines


@pytest.fixture
def folder(world, tmp_path):
    """A folder for all ranks."""
    return world.comm.bcast(str(tmp_path))


def test_one_rank_prepares_and_all_read_the_same(world, folder):
    source, lines = opened(world, folder)
    assert len(lines) == (world.rank == 0)
    samples = source.train(4_000, 4_200)
    mine = (samples.nodes.tolist(), samples.ids.values.tolist(), [b.index.tolist() for b in samples.blocks])
    assert all(other == mine for other in world.comm.allgather(mine))
    with open("/proc/self/maps") as maps:
        of_graph = {line.split()[-1]: line.split()[4] for line in maps if folder in line and "indices.npy" in line}
    assert len(of_graph) == 1 and len(set(world.node.allgather(tuple(of_graph.items())))) == 1  # one file in memory


def test_ranks_of_metis_read_heads_of_their_own(world, folder):
    pytest.importorskip("pymetis")
    source, _ = opened(world, folder, partition="metis", batch_size=BATCH)
    mine = set()
    for step in range(-(-source.num_train // (world.size * BATCH))):
        begin = (step * world.size + world.rank) * BATCH
        mine |= set(source.train(begin, begin + BATCH).nodes[:BATCH].tolist())
    everyone = world.comm.allgather(mine)
    assert len(set().union(*everyone)) == sum(map(len, everyone)) == source.num_train
    names = source.names(np.array(sorted(mine)))
    assert len(set(names.tolist())) == len(mine)
