"""The commands, one idea per file. Their modules import only what `--help` needs."""
