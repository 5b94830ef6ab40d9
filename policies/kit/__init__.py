"""Kit."""

from policies.kit.policy import Policy, Suggestions

__all__ = ["Policy", "Suggestions"]
