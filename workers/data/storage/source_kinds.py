"""Which source reads a URL: the one table of schemes."""

from __future__ import annotations

from typing import Any

from bus.wire.secret_urls import resolved
from schemas.errors import BadData, BadInput
from schemas.urls import local_path
from workers.data.storage import store_sources, web_source
from workers.data.storage.sources import FileSource, FilesystemSource, LocalSource


def open_source(url: str) -> FileSource:
    """The files below a URL, as far as this process's rules allow it.

    Args:
        url: A path, `http(s)://`, `s3://`, `hf://`, or any other that fsspec opens.

    Raises:
        BadData: no such scheme, its driver is missing, or the URL is forbidden.
    """
    try:
        address, _ = resolved(url)
        if local_path(address) is not None:
            return LocalSource(url)
        scheme = address.partition("://")[0]
        if scheme in ("http", "https"):
            return web_source.WebSource(url)
        if scheme in ("s3", "s3a"):
            return store_sources.S3Source(url)
        if scheme == "hf":
            return store_sources.HubSource(url)
        return FilesystemSource(url)
    except BadData:
        raise
    except BadInput as error:
        raise BadData(f"data.source {error.text}") from None


def source_on(filesystem: Any, path: str) -> FilesystemSource:
    """One file of a file system of fsspec that was opened already; not of this machine's."""
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    url = str(filesystem.unstrip_protocol(path))
    if protocols & {"s3", "s3a"}:
        return store_sources.S3Source(url, (filesystem, path))
    if "hf" in protocols:
        return store_sources.HubSource(url, (filesystem, path))
    return FilesystemSource(url, (filesystem, path))
