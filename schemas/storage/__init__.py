"""Where batches rest: the spool."""
