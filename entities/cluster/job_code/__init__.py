"""Code that travels with jobs, on a node (ADR-0051): which archives are unpacked here, and for how long.

`code_folders` has a confined worker fetch each archive once, and keeps its folder while a job here refers to
it. The agent, its instances and its short-lived workers ask for a job's folder. It opens no archive itself.
"""
