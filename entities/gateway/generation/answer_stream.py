"""The pieces of a request's answers as they come, of all its sessions together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from entities.gateway.generation.answer_text import AnswerText, TextPiece
from entities.gateway.generation.operations import Answering
from entities.gateway.generation.session import Session
from entities.tokens.byte_tokens import Tokenizer


async def pieces_of(session: Session, tokenizer: Tokenizer) -> AsyncIterator[TextPiece]:
    """One answer's pieces; the last one has `ends`. Ends the session at a stop.

    Raises what ends the session early.
    """
    text = AnswerText(tokenizer, session.generation.stop)
    async for token in session:
        piece = text.add(token)
        if piece is not None:
            yield piece
            if piece.ends:
                session.stop()  # which is silent if the session has ended with this token
                return
    yield TextPiece(text.number, "", (), "length")  # no token was asked for


async def merged(answering: Answering) -> AsyncIterator[tuple[int, TextPiece]]:
    """Pieces of all answers, each with its answer's index, as they come.

    Raises what ends one of them early.
    """
    news: asyncio.Queue[tuple[int, TextPiece] | BaseException | None] = asyncio.Queue()

    async def read(index: int, session: Session) -> None:
        try:
            async for piece in pieces_of(session, answering.tokenizer):
                news.put_nowait((index, piece))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    readers = [asyncio.create_task(read(*each)) for each in enumerate(answering.sessions)]
    try:
        left = len(readers)
        while left:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        answering.cancel()
