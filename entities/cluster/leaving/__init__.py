"""The end of a node agent whose machine goes away (ADR-0170): by a signal, or by an order of the mesh.

It decides when the agent ends: once nothing runs there, at the deadline at the latest. `agent` asks it. It
moves no instance: that is the orchestrator's matter.

agent_leave.py  `AgentLeave`: tells the orchestrator, and waits
"""
