"""Runs entities of the mesh in one operating-system process, and ends that process in order.

This package decides how an entity's name becomes a running service, how users' code on this machine is
confined, and what happens at a signal or when the parent process dies. The commands `run`, `join` and `policy
run` call it; `dmsc.launch` starts the processes that run them. It imports an entity's code only when the
entity runs, and never contains any of an entity's decisions.

composition.py     entity names and options → services; the only file that knows every constructor
interrupts.py      SIGINT, SIGTERM and SIGHUP as events of the loop
machine_drivers.py how pools of machines get theirs
policy_loading.py  a policy by name or from a user's file
run_options.py     the options of `dmsc run`
sandboxing.py      how users' code is confined here (ADR-0034)
secret_manifests.py a mesh's secrets as Secrets of Kubernetes
serving.py         runs services until a signal and stops them in order
"""
