"""The archive: rollouts at rest in one Parquet file, for years, for queries, and for getting them back as they were.

Any reader of Parquet takes such a file; `read_archive` checks every byte before Arrow reads it. docs/storage.md
describes the files.
"""

from keptset.schemas.storage.archive.reader import count_rows, read_archive, read_columns
from keptset.schemas.storage.archive.writer import Archived, write_archive

__all__ = ["Archived", "count_rows", "read_archive", "read_columns", "write_archive"]
