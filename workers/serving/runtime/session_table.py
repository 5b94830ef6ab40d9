"""A session as one instance knows it, and what the machine of sessions wants to be done (ADR-0144)."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.services.generation import BindSession, GeneratedToken, RowsNeeded
from schemas.step import Member

SCORED_TOKENS = 32
"""Of a prompt, the last ones: how likely the model finds them says how good it is at what users write."""
BLOCK_ROWS = 64
"""Room for rows is given in blocks of this many, as the cache takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLimits:
    """What an instance takes on, and how long it waits.

    Attributes:
        stage: Its stage.
        stages: Of the version.
        sessions: Most sessions at a time.
        rows: Rows of all sessions for which there is room: keys, values, and rows kept for a neighbour.
        context: Most tokens of a session, prompt and answer.
        vocabulary: Tokens are below this; 0: not known.
        chunk_rows: Most rows of one prompt in a wave.
        wave_rows: Most rows of all sessions in a wave.
        whole: Without a cache: each wave has a session's whole history.
        repeat_s: The first stage sends the row of a token again that has not come for so long. Shorter: a
            lost message delays less. Longer: fewer repetitions while the others are only busy.
        repeat_most_s: The pause between repetitions doubles up to this.
        ask_again_s: Rows that were asked for are asked for again after this time, if there is cause to: the
            question may have been lost.
        patience_s: A session of which nothing was heard for so long is forgotten. Its gateway is gone, and
            no other took over.
    """

    stage: int
    stages: int
    sessions: int = 64
    rows: int = 1 << 40
    context: int = 1 << 20
    vocabulary: int = 0
    chunk_rows: int = 64
    wave_rows: int = 256
    whole: bool = False
    repeat_s: float = 1.0
    repeat_most_s: float = 8.0
    ask_again_s: float = 0.25
    patience_s: float = 60.0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def blocks(self) -> int:
        """Blocks of rows that there is room for."""
        return self.rows // BLOCK_ROWS


@dataclass(slots=True, eq=False)
class BoundSession:
    """A session that a gateway has bound to this instance.

    Attributes:
        order: The binding that counts.
        tokens: Of the prompt and of the answer, as far as they are known here.
        prompt_tokens: How many of them are the prompt's.
        available: Rows that can be computed: the first stage has one for each token, others what came.
        computed: Rows that were computed.
        cursor: Rows that the next owner has, or has been sent.
        rebuilt: Rows below this were computed before, elsewhere: they count as a rebuild.
        sampled: Last stage: the tokens that it sampled, by position.
        scored: Last stage: logarithms of the probabilities of the prompt's last tokens, as far as computed.
        finished: Its last token is known, or it failed.
        touched: When something was last heard of it, seconds.
        repeat_at: First stage: when the newest row is sent again.
        pause_s: How long until it is repeated once more.
        served: Number of the wave in which it was last.
        asked: (rows that were there, when) of the last `RowsNeeded`.
    """

    order: BindSession
    tokens: list[int]
    prompt_tokens: int
    available: int = 0
    computed: int = 0
    cursor: int = 0
    rebuilt: int = 0
    sampled: dict[int, GeneratedToken] = field(default_factory=dict)
    scored: list[float] = field(default_factory=list)
    finished: bool = False
    touched: float = 0.0
    repeat_at: float = 0.0
    pause_s: float = 0.0
    served: int = 0
    asked: tuple[int, float] = (-1, 0.0)

    @property
    def number(self) -> int:
        return self.order.session

    @property
    def key(self) -> tuple[int, int]:
        """Fence and attempt: which path counts."""
        return self.order.fence, self.order.attempt

    @property
    def most_tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.order.most_tokens

    @property
    def blocks(self) -> int:
        return blocks_of(self.most_tokens)

    def wanted(self, first: int, rows: int) -> int:
        """Of how many of these rows, the last ones, the logits are wanted.

        Wanted are those behind which the next token is not known here, or is to be scored.
        """
        known = len(self.tokens) - 1
        if self.scores(first):
            known = min(known, max(0, self.prompt_tokens - 1 - SCORED_TOKENS))
        return max(0, min(rows, first + rows - known))

    def scores(self, first: int) -> bool:
        """Whether it is to be told how likely tokens of the prompt are, of a wave that begins at this row.

        What is computed anew after a loss was scored before.
        """
        asked, answered = self.order.sampling.scored, len(self.tokens) > self.prompt_tokens
        return asked and not self.rebuilt and not answered and first < self.prompt_tokens - 1


def blocks_of(tokens: int) -> int:
    """Blocks that so many rows need."""
    return -(-tokens // BLOCK_ROWS)


@dataclass(frozen=True, slots=True)
class WaveRows:
    """A session's part of a wave of this instance.

    Attributes:
        session: The session, as it was when the wave was chosen.
        first: Its first row.
        rows: How many.
        wanted: Last stage: of how many of its last rows logits are wanted.
    """

    session: BoundSession
    first: int
    rows: int
    wanted: int = 0

    @property
    def recomputed(self) -> int:
        """How many of them another owner had computed before."""
        return max(0, min(self.rows, self.session.rebuilt - self.first))


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows of a session on the way to its next owner: a line of a hop's table."""

    session: int
    fence: int
    attempt: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class AskForRows:
    """Publish `order` to `owner`, the owner upstream."""

    owner: Member
    order: RowsNeeded


@dataclass(frozen=True, slots=True)
class PublishAgain:
    """Publish these tokens: somebody seems to have missed them."""

    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class ForgetSession:
    """Free all that is kept for it; `rows` above 0: only what lies behind so many rows."""

    session: int
    rows: int = 0


SessionEffect = AskForRows | PublishAgain | ForgetSession
