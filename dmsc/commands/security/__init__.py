"""Commands about users, access rules, audit records, secrets, credentials and certificates.

`access`, `audit`, `secret` and `user` ask a gateway, which lets the authorizer (draft: AAM) decide.
`credential …` uses the root in a mesh's state folder; only `revoke` needs a running mesh. `cert` needs no
mesh at all. These commands decide nothing about permissions. Only `dmsc.cli` and neighbouring commands call
them.

access.py      `access explain`, `check`, `default`
audit.py       `audit list`, `verify`, `export`
cert.py        `cert`: a local CA and certificates
credential.py  `credential agent`, `gateway`, `router`, `module`, `list`, `revoke`
rotate.py      `credential rotate`: a new root of all credentials
secret.py      `secret set`, `list`, `remove`
secrets.py     `secrets`: a mesh's secrets as manifests
user.py        `user add`, `list`, `token`, `revoke`, `remove`, `whoami`
"""
