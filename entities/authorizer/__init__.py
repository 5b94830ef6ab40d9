"""AAM, authentication and authorization: `service.py` is the entity, `access_rules.py` its
decision on requests, `callout.py` that on connections."""

from entities.authorizer.guard_service import guarding
from entities.authorizer.service import Authorizer, AuthorizerConfig

__all__ = ["Authorizer", "AuthorizerConfig", "guarding"]
