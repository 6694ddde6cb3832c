"""Tabular data, CSV or Parquet: rules per column (rules.py), files and their units (files.py), rows of text and Parquet
in one form (text.py, parquet.py, convert.py), prepared once (prepare.py, vocabulary.py), then encoded as samples
(encoder.py) and read in a seeded order (source.py)."""

from hetmpi.data.files import DataError
from hetmpi.data.tabular.encoder import Encoder
from hetmpi.data.tabular.source import Reader, Tabular

__all__ = ["DataError", "Encoder", "Reader", "Tabular"]
