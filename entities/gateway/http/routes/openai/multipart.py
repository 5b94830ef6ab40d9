"""The body of a file's upload, `multipart/form-data` (RFC 7578), read as it comes. Pure.

A file may have hundreds of megabytes, so its bytes are handed on and nothing is kept on a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value
from enum import Enum

from schemas.errors import BadInput

MOST_TYPE = 1_000
"""Characters of a content type that are read; the time that the parser takes grows with their square."""
MOST_HEAD = 8 << 10
"""Bytes of a part's head."""
MOST_FIELD = 4 << 10
"""Bytes of a field that is no file."""
MOST_PARTS = 16
_BOUNDARY = re.compile(rb"^[0-9A-Za-z'()+_,./:=? -]{1,70}$")


class _At(Enum):
    START = 1
    HEAD = 2
    CONTENT = 3
    END = 4


def boundary_of(content_type: str) -> bytes:
    """The boundary that a request's header names. Raises `BadInput` if it is no form with one."""
    header = Message()
    header["content-type"] = content_type[:MOST_TYPE]
    raw = _parameter(header, "boundary", "content-type").encode("latin-1", "replace")
    if header.get_content_type() != "multipart/form-data" or not _BOUNDARY.match(raw):
        raise BadInput("the body is no multipart/form-data; send the file as OpenAI's clients do")
    return raw


@dataclass(slots=True)
class UploadForm:
    """The form as far as it has come: `feed` returns the next bytes of its file.

    Attributes:
        fields: Name → text of the parts that are no files.
        filename: Of the part `file`; None: it has not begun.
    """

    boundary: bytes
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    _buffer: bytes = b""
    _at: _At = _At.START
    _name: str = ""
    _text: bytes = b""
    _parts: int = 0
    _skip: int = 0

    @property
    def is_over(self) -> bool:
        return self._at is _At.END

    def feed(self, piece: bytes) -> bytes:
        """Takes the next bytes of the body; returns those of the file among them.

        Raises:
            BadInput: the body is no such form.
        """
        self._buffer += piece
        found: list[bytes] = []
        while self._step(found):
            pass
        return b"".join(found)

    def end(self) -> None:
        """The body is over. Raises `BadInput` if the form is not, or has no file."""
        if not self.is_over:
            raise BadInput("the form breaks off before its end; send it again")
        if self.filename is None:
            raise BadInput("the form has no part named file", param="file")

    def _step(self, found: list[bytes]) -> bool:
        """Takes what is whole; whether there may be more."""
        match self._at:
            case _At.START:
                return self._begin()
            case _At.HEAD:
                return self._take_head()
            case _At.CONTENT:
                return self._take_content(found)
        self._buffer = b""  # an epilogue, which nobody needs
        return False

    def _begin(self) -> bool:
        opening = b"--" + self.boundary
        if len(self._buffer) < len(opening) + 2:
            if not opening.startswith(self._buffer[: len(opening)]):
                raise BadInput("the body does not begin with the boundary that its header names")
            return False
        if not self._buffer.startswith(opening):
            raise BadInput("the body does not begin with the boundary that its header names")
        self._buffer = self._buffer[len(opening) :]
        return self._after_boundary()

    def _after_boundary(self) -> bool:
        """Behind a boundary: the next part's head, or the end."""
        if self._buffer.startswith(b"--"):
            self._at = _At.END
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise BadInput("a boundary of the form is followed by something else than a part")
        self._buffer = self._buffer[2:]
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise BadInput(f"the form has more than {MOST_PARTS} parts; it has purpose and file")
        self._at = _At.HEAD
        return True

    def _take_head(self) -> bool:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if len(head) > MOST_HEAD:
            raise BadInput("a part of the form has too long a head")
        if not separator:
            return False
        # The line break before a boundary belongs to it, and an empty part's boundary follows at once.
        self._buffer, self._skip = b"\r\n" + rest, 2
        header = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                header["content-disposition"] = value.strip()
        self._name = _parameter(header, "name", "content-disposition")
        if self._name == "file":
            if self.filename is not None:
                raise BadInput("the form has two files; upload one at a time", param="file")
            name = _parameter(header, "filename", "content-disposition")
            self.filename = "".join(filter(str.isprintable, name))[-255:] or "file.jsonl"
        self._text = b""
        self._at = _At.CONTENT
        return True

    def _take_content(self, found: list[bytes]) -> bool:
        closing = b"\r\n--" + self.boundary
        place = self._buffer.find(closing)
        if place < 0:
            sure = max(0, len(self._buffer) - len(closing) - 1)
            self._hand_on(self._buffer[:sure], found)
            self._buffer = self._buffer[sure:]
            return False
        if len(self._buffer) < place + len(closing) + 2:
            return False
        self._hand_on(self._buffer[:place], found)
        self._buffer = self._buffer[place + len(closing) :]
        if self._name != "file":
            self.fields[self._name] = self._text.decode("utf-8", "replace")
        return self._after_boundary()

    def _hand_on(self, data: bytes, found: list[bytes]) -> None:
        data, self._skip = data[self._skip :], max(0, self._skip - len(data))
        if self._name == "file":
            found.append(data)
            return
        self._text += data
        if len(self._text) > MOST_FIELD:
            raise BadInput(f"field {self._name[:60]} of the form has more than {MOST_FIELD} bytes")


def _parameter(header: Message, name: str, of: str) -> str:
    """A header's parameter, empty where it is not there. Raises `BadInput` if it can't be read.

    Names as RFC 2231 writes them say their own encoding, some of which fail, or give halves of characters.
    """
    try:
        found = header.get_param(name, "", of)
        text = collapse_rfc2231_value(found) if found is not None else ""
    except (ValueError, TypeError, LookupError):
        text = f"the parameter {name} of the form can't be read; write it plainly, in UTF-8"
        raise BadInput(text) from None
    return text.strip().encode("utf-8", "replace").decode()
