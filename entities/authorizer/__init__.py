"""AAM, authentication and authorization: `service.py` is the entity, `access_rules.py` its decision."""

from entities.authorizer.service import Authorizer, AuthorizerConfig

__all__ = ["Authorizer", "AuthorizerConfig"]
