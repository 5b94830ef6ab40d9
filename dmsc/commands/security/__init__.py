"""Commands about users, access rules, audit records, secrets, credentials and certificates.

`access`, `audit`, `secret` and `user` ask a gateway, which lets the authorizer (draft: AAM) decide.
`credential`, `rotate` and `cert` work on a mesh's state folder and need its root; no mesh needs to run. No
secret is ever an argument, which other users of the machine could see. Only `dmsc.cli` and neighbouring
commands call these modules.

access.py      `access explain`, `check`, `default`
audit.py       `audit list`, `verify`, `export`
cert.py        `cert`: a local CA and certificates
credential.py  `credential agent`, `gateway`, `router`, `module`, `list`, `revoke`
rotate.py      `credential rotate`: a new root of all credentials
secret.py      `secret set`, `list`, `remove`
user.py        `user add`, `list`, `token`, `revoke`, `remove`, `whoami`
"""
