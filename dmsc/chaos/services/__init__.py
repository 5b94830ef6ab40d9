"""Chaos runs of model services: clients ask all the time, and each answer is compared with the first.

It decides what is asked, and whether an answer lost or doubled anything; faults, victims and plans are those
of jobs (`dmsc.chaos`). `dmsc chaos SERVICE` calls it.

load.py             pure: requests, and what an answer is beside the undisturbed one
service_report.py   pure: answers and faults → gaps, goodput, verdict, as text
service_chaos.py    the asyncio shell around these
"""
