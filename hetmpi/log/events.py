"""Writes the TensorBoard event file of a run, record by record.

It uses tensorboard's record writer instead of SummaryWriter: there is no extra thread, a step takes a tenth of the time
(40 us for 8 values), and a full disk raises an exception here instead of printing another thread's traceback. A tag is
the figure's group and key, as in cache/hit_rate. Tags under final/ hold metrics of the whole run, which HPARAMS shows
with its settings.
"""

from __future__ import annotations

import io
import numbers
import os
import socket
import time
from pathlib import Path

from hetmpi.log.figures import figure_of, is_of_task
from hetmpi.log.files import append

FINAL = ("samples_per_s", "seconds", "hit_rate")  # written under final/, with the task's metrics and the bytes
PLACES = ("run.dir", "checkpoint.dir", "resume")  # paths, which are not hyperparameters


class EventFile:
    """Writes to `path`, a new file. Raises OSError if it cannot be written."""

    def __init__(self, folder: Path, settings: dict):
        """settings: key -> value, keys as on the command line."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._histogram_proto = Event, Summary, HistogramProto
        self._record_writer = RecordWriter
        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        known = {key: hyperparameter(value) for key, value in settings.items() if key not in PLACES}
        self._write(Event(wall_time=time.time(), summary=hparams_pb(known, trial_id=str(folder.resolve()))))

    def step(self, values: dict) -> None:
        """Writes every number of a logged step, and the histogram of lags."""
        shown = self._scalars(values)
        if values.get("lags"):
            shown.append(self._summary.Value(tag="cache/lags", histo=self._histogram(values["lags"])))
        self._append(values["step"], shown)

    def evaluation(self, values: dict) -> None:
        """Writes the task's metrics."""
        own = {key: value for key, value in values.items() if is_of_task(key, value)}
        self._append(values["step"], self._scalars(own))

    def finish(self, step: int, final: dict) -> None:
        """Writes the run's metrics under final/ and marks the run as finished."""
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        end = SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=end))
        ended = self._summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
        self._append(step, [*self._scalars(final, "final"), ended])

    def _scalars(self, values: dict, group: str | None = None) -> list:
        return [
            self._summary.Value(tag=f"{group or figure_of(key).group}/{key}", simple_value=value)
            for key, value in values.items()
            if key != "step" and isinstance(value, numbers.Real)
        ]

    def _append(self, step: int, shown: list) -> None:
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=shown)))

    def _histogram(self, lags: list[int]):
        """lags: as of TableGroup.lags; bin 0 is lag 0, bin i is lags from 2^(i-1) to 2^i - 1."""
        limits = [2**i - 0.5 for i in range(len(lags))]
        middles = [0.0] + [1.5 * 2 ** (i - 1) - 0.5 for i in range(1, len(lags))]
        return self._histogram_proto(
            min=0, max=max(limit for limit, count in zip(limits, lags) if count), num=sum(lags),
            sum=sum(m * n for m, n in zip(middles, lags)), sum_squares=sum(m * m * n for m, n in zip(middles, lags)),
            bucket_limit=limits, bucket=lags,
        )  # fmt: skip

    def _write(self, event) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        append(self.path, record.getvalue())


def hyperparameter(value) -> bool | float | str:
    """Converts a setting to a type that the HPARAMS page accepts."""
    return value if isinstance(value, (bool, int, float, str)) else "null" if value is None else str(value)
