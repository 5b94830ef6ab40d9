"""Authentication and the access rules of Type 3 (draft §4.3), pure but for reading files.

It decides which user a token belongs to, and which rule of the access file allows or denies an action.
`entities.authorizer.service` calls it for requests, `entities.authorizer.connections` for connections, and
`dmsc access` to explain rules. It knows nothing of the bus, and never stores a token.

- `authentication`: from a token to a user
- `user_tokens`: signed tokens that expire
- `access_policy`: rules, quotas and the decision; `access.yaml` has the default rules
- `access_files`: the file of the rules; `reloaded_file`: a file that is reloaded when it changes
"""
