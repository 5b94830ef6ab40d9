"""Scenario files of the simulator, and the files that they name.

`scenario.py` decides what a scenario may contain and checks it; each mistake is one line with its place. The
world and the results read scenarios from here; nothing here simulates anything.

scenario.py       the models of a scenario file
service_times.py  sources of random or measured service times
traces.py         links from measured throughputs or topologies
"""
