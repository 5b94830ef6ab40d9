"""The commands of `dmsc`, one topic per file; `dmsc.cli` registers them.

A command reads its options, calls the code that does the work (a client, `dmsc.launch`, `dmsc.follow`,
`dmsc.replay`, …), prints the result and ends with an exit code. It decides nothing about jobs or the mesh.
Nobody but `dmsc.cli` and neighbouring commands imports these modules. They import only what `--help` needs
at the top and everything else inside functions; a test holds that.

mesh/      start, stop and check a mesh; join it; cordon and drain nodes
data/      build data sets, their versions
jobs/      train, follow and manage jobs; recorded runs; chaos; simulation
observe/   look at a running mesh: routes, top, faults, logs, tap, stores, dashboard
policies/  functional modules: write, run, order, score, promote
security/  users, access rules, audit, secrets, credentials, certificates
"""
