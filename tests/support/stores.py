"""A store of rows on disk for tests of any size."""

from hetmpi.owner.row_files import LEAST_PAGES, FileStore


class HundredthStore(FileStore):
    """Keeps a hundredth of a rank's rows in memory, but never fewer than the least number of pages."""

    def pages(self, layout):
        return max(LEAST_PAGES, layout.file_bytes // 4096 // 100)

    def check(self, layout):
        pass
