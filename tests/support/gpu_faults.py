"""Faults that gpu_soak.py plants, and what is then said."""

LATE_READ = "memory was written before a stream that reads it had read it"
OTHER_ROWS = r"case \d+: rows of t\d at step \d+ differ"

FAULTS = {
    "wait": "pinned memory was written by the host before an operation that uses it had run",  # the host waits for none
    "hand_over": f"{LATE_READ}|{OTHER_ROWS}",  # no stream waits for another one
    "give": f"{LATE_READ}|{OTHER_ROWS}",  # torch does not wait for rows
    "take": OTHER_ROWS,  # the cache does not wait for gradients
    "give_back": OTHER_ROWS,  # torch writes gradients that the cache still reads
    "record": LATE_READ,  # memory is used again by the stream that it came from
    "reuse": "pinned memory is freed before an operation that uses it has run",
}
