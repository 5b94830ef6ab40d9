"""Machines that go away at a deadline, and what a job does about its instances there (ADR-0171).

It decides how each instance leaves so that no step is computed again: with a member of its stage that goes
on, after a newcomer has its state, or after a checkpoint of that step. `membership.MembershipChanges` creates
`NoticedLeave` and calls it when a step is decided and while training rests; `nodes.Draining` says which
machines go. It never ends a node agent, and decides nothing about the open step but to begin it again.

leave_plan.py     how instances leave, and in which order; pure
noticed_leave.py  `NoticedLeave`: has them leave so
"""
