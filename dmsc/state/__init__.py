"""The state of meshes on this machine: state folders, identities, credentials and certificates.

This package decides where a mesh's files are and what they contain, which mesh a command means, and which
credential each process of a mesh gets. The commands, `dmsc.launch` and `dmsc.client` call it. It never starts
a process, and it never sends a mesh's secrets to another mesh.

certificates.py        a local CA and server certificates
cleartext_notice.py    the notice of what travels unencrypted
identities.py          identities of a mesh's processes, and their credentials
issued_credentials.py  the list of credentials that were made by hand, and their revocation
renewals.py            new credentials for running processes
settings.py            where the mesh is: arguments, environment, state folder
state_folder.py        the files of a state folder
"""
