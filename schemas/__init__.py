"""Every message and record of the mesh, as frozen pydantic models. Imports nothing of ours."""
