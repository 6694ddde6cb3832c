"""Synthetic samples without dense features: data._target_=ids_only.IdsOnly"""

from dataclasses import replace

from hetmpi.data.synthetic import Synthetic


class IdsOnly:
    name, num_fields, num_dense = "synthetic", Synthetic.num_fields, 0

    def __init__(self, **settings):
        self.whole = Synthetic(**settings)
        for name in ("num_rows", "num_train", "num_valid", "prepare"):
            setattr(self, name, getattr(self.whole, name))

    def train(self, start, stop):
        return without_dense(self.whole.train(start, stop))

    def valid(self, start, stop):
        return without_dense(self.whole.valid(start, stop))


def without_dense(samples):
    return replace(samples, dense=samples.dense[:, :0])
