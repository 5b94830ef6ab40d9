"""Model services at the door: deploying versions, and orders about services.

It checks what a version may name, and whose it is; requests to services are not its matter. The routes in
`http/routes/services/` call it. It runs nothing: the orchestrator does.

operations.py   `ServiceOperations`: deploy, list, and change services
"""
