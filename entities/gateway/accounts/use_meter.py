"""How many tokens this gateway gave each user, by version: what reports to the accountant say. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.accounts import MOST_USES, TOLD_AGAIN_S, ServiceUse


@dataclass(slots=True)
class _Use:
    began: float
    changed: float
    prompt_tokens: int = 0
    tokens: int = 0
    answers: int = 0


class UseMeter:
    """Times are seconds since the epoch, and never go back."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], _Use] = {}

    def add(self, job: str, user: str, now: float, *, prompt_tokens: int = 0, tokens: int = 0) -> None:
        """An answer to a user is over.

        Args:
            job: Of the version that gave it.
            user: Who asked.
            now: The present.
            prompt_tokens: Of the prompt.
            tokens: Of the answer.
        """
        use = self._uses.pop((job, user), None) or _Use(began=now, changed=now)
        use.changed = now
        use.prompt_tokens += prompt_tokens
        use.tokens += tokens
        use.answers += 1
        self._uses[job, user] = use  # the last that changed is the last of all

    def told(self, now: float) -> tuple[ServiceUse, ...]:
        """What a report says: all that changed a short time ago. What it leaves out begins anew."""
        keys = list(self._uses)
        for place, key in enumerate(keys):
            if self._uses[key].changed < now - TOLD_AGAIN_S or len(keys) - place > MOST_USES:
                del self._uses[key]
        return tuple(
            ServiceUse(
                job=job,
                user=user,
                began=use.began,
                prompt_tokens=use.prompt_tokens,
                tokens=use.tokens,
                answers=use.answers,
            )
            for (job, user), use in self._uses.items()
        )
