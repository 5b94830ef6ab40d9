"""Object stores whose answers say which state of a file they are of: S3, and the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from workers.data.storage.sources import FileState, FilesystemSource, joined


class S3Source(FilesystemSource):
    """Ranges by s3fs. The answer's own ETag is compared, so that a range takes one request."""

    def state(self, name: str) -> FileState:
        info = self.filesystem.info(joined(self.path, name), refresh=True)
        if info.get("type") == "directory":
            raise FileNotFoundError(self.described(name))
        return FileState(int(info["size"]), str(info.get("ETag", "")).strip('"'))

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        from fsspec.asyn import sync

        bucket, key, version = self.filesystem.split_path(joined(self.path, name))
        mark, data = sync(
            self.filesystem.loop, self._get, bucket, key, version, f"bytes={start}-{start + length - 1}"
        )
        if mark != state.mark:
            raise self.changed(name, FileState(state.size, mark))
        if len(data) != length:
            raise OSError(f"{len(data):,} bytes came, not {length:,}")
        return bytes(data)

    async def _get(self, bucket: str, key: str, version: str | None, span: str) -> tuple[str, bytes]:
        more: dict[str, Any] = {"VersionId": version} if version else {}
        answer = await self.filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=span, **more, **self.filesystem.req_kw
        )
        return str(answer["ETag"]).strip('"'), await answer["Body"].read()


class HubSource(FilesystemSource):
    """Files of one commit of a repository of the Hugging Face hub: a branch is resolved when it is opened."""

    def __init__(self, url: str, opened: tuple[Any, str] | None = None) -> None:
        super().__init__(url, opened)
        place = self.filesystem.resolve_path(self.path)
        commit = self.filesystem._api.repo_info(
            place.repo_id, repo_type=place.repo_type, revision=place.revision
        ).sha
        folder = {"dataset": "datasets/", "space": "spaces/"}.get(place.repo_type, "")
        self.path = joined(f"{folder}{place.repo_id}@{commit}", place.path_in_repo)

    def state(self, name: str) -> FileState:
        info = self.filesystem.info(joined(self.path, name))
        if info.get("type") == "directory":
            raise FileNotFoundError(self.described(name))
        return FileState(int(info["size"]), self.path.partition("@")[2].partition("/")[0])

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        with self.filesystem.open(joined(self.path, name), "rb", cache_type="none") as file:
            file.seek(start)
            data = bytes(file.read(length))
        if len(data) != length:
            raise OSError(f"{len(data):,} bytes came, not {length:,}")
        return data

    def identity(self, name: str) -> str:
        return f"hf://{joined(self.path, name)}"
