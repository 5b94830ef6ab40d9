"""What a gateway says of model services before it has read them."""

from __future__ import annotations

import pytest

from bus.tasks import background
from entities.gateway.generation.service_book import ServiceBook
from schemas.errors import DmscError, NotFound, Unavailable
from tests.integration.entities.conftest import Dial
from tests.waiting import eventually


async def test_no_service_is_missing_before_all_were_read(dial: Dial) -> None:
    book = ServiceBook(await dial("gateway-a"))
    with pytest.raises(Unavailable, match="has not read the services yet") as refused:
        book.version("chat", "key")
    assert refused.value.fields["retry_after_s"] > 0

    def answer() -> DmscError:
        try:
            book.version("chat", "key")
        except DmscError as error:
            return error
        raise AssertionError("there is no such service")

    async with background(book.run()):
        await eventually(lambda: not isinstance(answer(), Unavailable))
        with pytest.raises(NotFound, match="'chat' does not exist; there are: none"):
            book.version("chat", "key")
