"""What the benchmarks share: options, meshes, jobs, processes, turns and figures.

A benchmark says what it measures and what its figures mean; everything around that is here. Benchmarks call
it; it measures nothing by itself.

command.py    options of the command line, and printing as lines or JSON
emulation.py  slots whose speed and link change by a script
emptiness.py  an empty part is an error in one line
figures.py    spreads and percentiles; figures beside their bars, and a sheet of them
http_connection.py  an HTTP client that costs little
jobs.py       specifications of small jobs; a job's steps, its record and its weights
meshes.py     meshes of a benchmark's own, gone afterwards
processes.py  processes that end with a block; alternating order of what is compared
sections.py   a benchmark of several sections: one that fails says so, and the next one follows
"""
