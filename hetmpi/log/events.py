"""TensorBoard's event file of a run, written record by record.

By tensorboard's own record writer and no SummaryWriter: no thread beside the training, a tenth of the time per step
(40 us for 8 values), and a full disk is an exception here, not a traceback of another thread. A tag is the figure's
group and key, as in cache/hit_rate; final/ holds figures of the whole run, beside its settings under HPARAMS.
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

FINAL = ("samples_per_s", "seconds", "hit_rate")  # of the summary, under final/ beside the task's figures and the bytes
PLACES = ("run.dir", "checkpoint.dir", "resume")  # settings that say where, not how


class EventFile:
    """Writes to `path`, a new file. Raises OSError where that cannot be written."""

    def __init__(self, folder: Path, settings: dict):
        """settings: key -> value, as on the command line."""
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
        """Every number of a logged step, and the histogram of lags."""
        shown = self._scalars(values)
        if values.get("lags"):
            shown.append(self._summary.Value(tag="cache/lags", histo=self._histogram(values["lags"])))
        self._append(values["step"], shown)

    def evaluation(self, values: dict) -> None:
        """The task's figures."""
        own = {key: value for key, value in values.items() if is_of_task(key, value)}
        self._append(values["step"], self._scalars(own))

    def finish(self, step: int, final: dict) -> None:
        """The run's figures under final/, and that it has ended."""
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
        """lags as EmbeddingTable counts them: bin 0 no lag, bin i lags below 2^i."""
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
    """A setting as the HPARAMS page takes it."""
    return value if isinstance(value, (bool, int, float, str)) else "null" if value is None else str(value)
