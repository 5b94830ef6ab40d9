"""What every command of `dmsc` shares at the terminal.

This package decides how options that several commands have are named and read, how results are printed,
which exit code an error gets, and how a command's coroutine is run. The modules of `dmsc.commands` call it.
It never talks to the mesh itself; `GatewayOptions` only opens a client for the command. Its modules import
the schemas and the client inside functions, so that `dmsc --help` stays quick.

command_app.py    commands whose options are the fields of dataclasses
durations.py      durations as people type them: 90s, 30m, 8h, 14d
exit_codes.py     the exit codes and the errors that they stand for
option_groups.py  options that commands take together: a gateway, the bus, JSON
options.py        shared options, and printing of JSON, text and tables
running.py        running a coroutine, reporting an error
svg_files.py      the file that `--plot` names
"""
