"""What a job's author has done on their own machine before anything is submitted.

It decides which files of a folder travel with a job and to which bytes they are packed, how functions of a
notebook become files, and whether a job can be trained at all, by trying it here. The clients and the
commands `train` and `check` call it. It never sends anything, and never runs a job's code in the calling
process.

code_folder.py  packs a folder of code
functions.py    functions and classes of a notebook as files, by source or pickled
local_check.py  a job's check on this machine, in a process of its own
"""
