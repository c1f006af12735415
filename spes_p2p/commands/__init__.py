"""What `spes COMMAND` runs, where a command is nothing else."""
