"""Ranks that are threads of one process, for what only needs a barrier."""

import threading


def on_threads(size, call):
    """What call(rank, barrier) returns on each of `size` ranks, in their order. Raises the first rank's error."""
    meeting, results, errors = threading.Barrier(size), {}, []

    def run(rank):
        try:
            results[rank] = call(rank, meeting.wait)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
