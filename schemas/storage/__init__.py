"""Where batches rest: the spool, and the archive in Parquet."""
