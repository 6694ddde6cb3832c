"""Faults that gpu_soak.py plants, and what is then said."""

LATE_READ = "memory was written before a stream that reads it had read it"
OTHER_ROWS = r"case \d+: \w+ of t\d.* differ"
NOT_THERE = r"keys must lie in \[0, \d+\), got"  # of sums that the host reads before they have come
CRASH = "Segmentation fault"  # in a kernel that reads a place before it is written
REUSED = "pinned memory was written by the host before an operation that uses it had run|has changed between the launch"

FAULTS = {
    "wait": f"{REUSED}|{OTHER_ROWS}",  # the host waits for nothing
    "hand_over": f"{LATE_READ}|{OTHER_ROWS}|{CRASH}",  # no stream waits for another one
    "give": f"{LATE_READ}|{OTHER_ROWS}",  # torch does not wait for rows, nor for what has read its gradients
    "take": f"{OTHER_ROWS}|{CRASH}",  # the lines do not wait for gradients, nor moves for decisions
    "late": f"{REUSED}|{NOT_THERE}",  # events are said to have happened before they have
    "record": LATE_READ,  # memory of rows and batches is used again by the stream that it came from
}
