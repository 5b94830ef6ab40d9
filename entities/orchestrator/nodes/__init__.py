"""Places that operators or broken devices take out of use: cordoned, drained, opened again.

`cordon_service` keeps cordons in their bucket and answers operators' requests; `draining` has jobs move
their instances elsewhere. The leader calls it. It never decides where an instance goes: that is `planning`.
"""
