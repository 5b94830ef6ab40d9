"""What is a sample's fault, and what is the machine's."""

from __future__ import annotations

import errno
import gzip
import http.client
import io
from collections.abc import Callable
from typing import Any
from urllib.error import URLError

import pytest

from schemas.errors import Unavailable
from schemas.job_file.data import SourceSpec
from workers.data.kinds.decoding import by_its_bytes
from workers.data.kinds.images import ImageDecoder
from workers.data.samples import UnreadableSample

image = pytest.importorskip("PIL.Image")


def png() -> bytes:
    content = io.BytesIO()
    image.effect_noise((64, 64), 99).save(content, "PNG")
    return content.getvalue()


def caught(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011  # of any kind
        call()
    return found.value


def test_what_a_decoder_says_of_bytes_is_the_samples_fault() -> None:
    assert by_its_bytes(caught(lambda: image.open(io.BytesIO(b"no image"))))
    assert by_its_bytes(caught(lambda: image.open(io.BytesIO(png()[:2000])).load()))
    assert by_its_bytes(caught(lambda: gzip.decompress(b"no gzip")))
    assert by_its_bytes(EOFError("cut off"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError("something without a number"),
        URLError("no route"),
        TimeoutError("timed out"),
        http.client.RemoteDisconnected("closed"),
        MemoryError(),
    ],
)
def test_an_error_of_disk_or_network_is_not(error: Exception) -> None:
    def fails() -> None:
        raise error

    assert not by_its_bytes(caught(fails))


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EIO, "disk"), URLError("x"), Unavailable("x")]
)
def test_an_image_is_not_replaced_because_its_node_fails(error: Exception) -> None:
    class Lazy:
        def convert(self, mode: str) -> Any:
            raise error

    decode = ImageDecoder(SourceSpec.model_construct(kind="images"), "data")
    with pytest.raises(type(error)):
        decode(Lazy(), "x.png", 0, None)
    with pytest.raises(UnreadableSample, match=r"x.png is no image that can be read"):
        decode(b"no image", "x.png", 0, None)
