"""A file's form, however its bytes come; a form that is none is one line."""

from __future__ import annotations

import random

import httpx
import pytest

from entities.gateway.http.routes.openai.multipart import UploadForm, boundary_of
from schemas.errors import BadInput

CONTENT = b'{"a": 1}\r\n--not the boundary\r\n\r\n' + bytes(range(256)) * 20


def form_of(content: bytes, **fields: str) -> tuple[bytes, bytes]:
    """The boundary and the body, as httpx (and so OpenAI's client) writes them."""
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("a b.jsonl", content)})
    return boundary_of(request.headers["content-type"]), request.read()


@pytest.mark.parametrize("content", [CONTENT, b"", b"\r\n", b"x"])
@pytest.mark.parametrize("seed", range(4))
def test_the_file_comes_out_whole(content: bytes, seed: int) -> None:
    boundary, body = form_of(content, purpose="batch", other="é")
    sizes = random.Random(seed)
    form, found = UploadForm(boundary), b""
    while body:
        size = sizes.choice((1, 3, 50, 5_000))
        found += form.feed(body[:size])
        body = body[size:]
    form.end()
    assert found == content
    assert form.fields == {"purpose": "batch", "other": "é"}
    assert form.filename == "a b.jsonl"


def test_the_file_may_come_before_the_fields() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    )
    form = UploadForm(b"b")
    assert form.feed(body) == b"abc"
    form.end()
    assert form.fields == {"purpose": "batch"}


HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"abc", "boundary"),
        (b"--c\r\n", "boundary"),
        (b"--bxx", "followed"),
        (HEAD % b"file" + b"abc", "breaks off"),
        (HEAD % b"purpose" + b"batch\r\n--b--", "no part named file"),
        (HEAD % b"purpose" + b"x" * 5_000 + b"\r\n--b--", "more than 4096"),
        (b"--b\r\n" + b"x" * 9_000 + b"\r\n\r\n", "too long a head"),
        ((HEAD % b"x" + b"\r\n") * 17 + b"--b--", "more than 16 parts"),
        (HEAD % b"file" + b"\r\n" + HEAD % b"file" + b"\r\n--b--", "two files"),
    ],
)
def test_a_form_that_is_none_is_refused(body: bytes, words: str) -> None:
    def read() -> None:
        form = UploadForm(b"b")
        form.feed(body)
        form.end()

    with pytest.raises(BadInput, match=words):
        read()


@pytest.mark.parametrize(
    "header", ["", "application/json", "multipart/form-data", 'multipart/form-data; boundary="é"']
)
def test_a_body_without_a_form_is_refused(header: str) -> None:
    with pytest.raises(BadInput, match="form-data"):
        boundary_of(header)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (b"filename*=undefined''x", None),
        (b"filename*=idna''xn--%80", None),
        (b"filename*0=a; filename*=b", None),
        (b"filename*=unicode_escape''%5Cud800", "?"),
        (b'filename="a\x00b\x1b"', "ab"),
        (b"filename=", "file.jsonl"),
        ("filename=é".encode(), "é"),
    ],
)
def test_a_files_name_is_a_text_whatever_its_header_says(parameters: bytes, name: str | None) -> None:
    form = UploadForm(b"xx")
    head = b'--xx\r\nContent-Disposition: form-data; name="file"; ' + parameters + b"\r\n\r\n"
    if name is None:
        with pytest.raises(BadInput, match="can't be read; write it plainly"):
            form.feed(head)
    else:
        assert form.feed(head + b"{}\r\n--xx--\r\n") == b"{}"
        assert form.filename == name
    with pytest.raises(BadInput, match="boundary"):
        boundary_of("multipart/form-data; boundary*=undefined''x")
