"""What tests use that also run with lines on a GPU: the settings of a cache, and the device, that the environment names
(emulated.py)."""

import os
from importlib import import_module

_module, _, _name = os.environ.get("HETMPI_TEST_CACHE", "hetmpi.table.cache.CacheSettings").rpartition(".")
CacheSettings = getattr(import_module(_module), _name)
DEVICE = os.environ.get("HETMPI_TEST_DEVICE", "cpu")
