"""Run by test_hosts.py on every rank: is each host a separate node, and does one-sided memory reach the other?"""

import json
import socket

import numpy as np
from mpi4py import MPI

COUNT = 1 << 18  # 1 MB of float32

comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
shared = MPI.Win.Allocate_shared(4 * COUNT, 4, comm=node)
own = np.frombuffer(shared.tomemory(), np.float32)
window = MPI.Win.Create(own, 4, comm=comm)  # over the job, on the node's shared memory
window.Lock_all()

last = (comm.rank - 1) % comm.size
message = np.full(COUNT, comm.rank, np.float32)  # must live until the flush
window.Put(message, (comm.rank + 1) % comm.size)
window.Flush_all()
comm.Barrier()
put_arrived = bool((own == last).all())
got = np.empty(COUNT, np.float32)
window.Get(got, (comm.rank + comm.size // 2) % comm.size)
window.Flush_all()
get_arrived = bool((got == (comm.rank + comm.size // 2 - 1) % comm.size).all())

window.Unlock_all()
window.Free()
shared.Free()
told = comm.gather({"host": socket.gethostname(), "node": sorted(node.allgather(comm.rank)),
                    "put_arrived": put_arrived, "get_arrived": get_arrived})  # fmt: skip
if comm.rank == 0:
    print(json.dumps(told), flush=True)
