"""The `keptset` command: one short file per subcommand."""
