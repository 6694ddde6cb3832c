"""CacheSettings of the tests that also run with lines on a GPU: of the class that HETMPI_TEST_CACHE names."""

import os
from importlib import import_module

_module, _, _name = os.environ.get("HETMPI_TEST_CACHE", "hetmpi.table.cache.CacheSettings").rpartition(".")
CacheSettings = getattr(import_module(_module), _name)
