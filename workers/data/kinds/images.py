"""Kind `images`: a folder of images, one folder a class, or a Parquet column of images; by Pillow.

A sample is `inputs`, (channels, height, width) float32, and, where there are classes, `targets`, int64: the
number of its class in the order of the classes' names.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bus.logs import get_logger
from schemas.errors import BadData, DmscError
from schemas.job_file.data import SourceSpec
from workers.data.collating import as_tensor
from workers.data.kinds.decoding import by_its_bytes, image_tensor, is_image, library, seed_generators
from workers.data.kinds.image_transforms import ImageTransform, image_transforms
from workers.data.samples import Opening, Samples, UnreadableSample
from workers.data.source_files import SourceFile, files_digest, list_files
from workers.user_code import describe, load

log = get_logger("data")

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class ImageBytes(Protocol):
    """The images as they lie: the bytes of each by number."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...

    def close(self) -> None: ...


class ImageSamples:
    """Decoded and transformed images.

    Args:
        images: Their bytes.
        targets: The class of each; empty: there are none.
        spec: Size, mode and transforms.
        at: The source's key in the job file.
        digest: Of the data.
        classes: Their names, if these are folders.
    """

    def __init__(
        self,
        images: ImageBytes,
        targets: Sequence[int],
        spec: SourceSpec,
        at: str,
        digest: str,
        classes: Sequence[str] = (),
    ) -> None:
        self._images, self._targets, self._at = images, targets, at
        self._decode = ImageDecoder(spec, at)
        self.digest = digest
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        inputs = self._decode(self._images.content(index), self._images.name(index), index, seed)
        return (
            {"inputs": inputs, "targets": int(self._targets[index])}
            if len(self._targets)
            else {"inputs": inputs}
        )

    def close(self) -> None:
        self._images.close()


class ImageDecoder:
    """From bytes to a tensor: mode, size, the user's function, transforms."""

    def __init__(self, spec: SourceSpec, at: str) -> None:
        self._image = library("PIL.Image", spec.kind, at)
        size = spec.image_size
        self._size = (size, size) if isinstance(size, int) else size
        self._mode = spec.image_mode
        self._name = spec.transform
        self._users = None if spec.transform is None else load(spec.transform)
        self._transforms: Sequence[ImageTransform] = image_transforms(spec.image_transforms, at)
        self._at = at

    def __call__(self, content: bytes | Any, name: str, index: int, seed: int | None) -> Tensor:
        """The tensor of an image: its bytes, or a Pillow image.

        Raises:
            UnreadableSample: Its bytes are no image.
        """
        image = self._decoded(content, name)
        if self._size is not None and (image.height, image.width) != self._size:
            image = image.resize((self._size[1], self._size[0]), self._image.Resampling.BILINEAR)
        if self._users is not None:
            image = self._changed(image, name, index if seed is None else seed)
        for number, transform in enumerate(self._transforms):
            image = transform(image, seed, number)
        return image_tensor(image) if is_image(image) else as_tensor("inputs", image)

    def _decoded(self, content: bytes | Any, name: str) -> Any:
        try:
            image = self._image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
            return image.convert(self._mode)
        except (DmscError, MemoryError):
            raise
        except Exception as error:  # Pillow raises whatever its decoders raise
            if isinstance(error, OSError) and not by_its_bytes(error):
                raise
            raise UnreadableSample(
                f"{self._at}: {name} is no image that can be read: {describe(error)}"
            ) from error

    def _changed(self, image: Any, name: str, seed: int) -> Any:
        assert self._users is not None
        seed_generators(seed)
        try:
            return self._users(image)
        except Exception as error:  # user code may raise anything
            raise BadData(f"{self._at}.transform {self._name} failed at {name}: {describe(error)}") from error


def open_images(spec: SourceSpec, opening: Opening) -> Samples:
    """Kind images.

    Raises:
        BadData: There are no images, or a column is missing.
    """
    key = f"{opening.at}.source"
    files = list_files(spec.source, opening.fetched, key=key, endings=(*ENDINGS, ".parquet", ".pq"))
    if any(file.name.lower().endswith((".parquet", ".pq")) for file in files):
        return _of_parquet(files, spec, opening)
    folders = [file.name.rpartition("/")[0] for file in files]
    classes = sorted(set(folders))
    numbers = {folder: number for number, folder in enumerate(classes)}
    targets: list[int] = []
    if classes != [""]:
        if "" in numbers:
            raise BadData(
                f"{key} {spec.source}: {files[folders.index('')].name} lies beside the classes' folders; "
                "put it into one"
            )
        targets = [numbers[folder] for folder in folders]
        log.info("classes of images, by folder", source=opening.at, classes=len(classes))
    named = classes if targets else ()
    return ImageSamples(_Files(files), targets, spec, opening.at, files_digest(files, *named), named)


class _Files:
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def content(self, index: int) -> bytes:
        with self._files[index].open() as file:
            return file.read()

    def name(self, index: int) -> str:
        return self._files[index].name

    def close(self) -> None:
        self._files = ()


class _Packed:
    """Images one after another in a file of the spool."""

    def __init__(self, path: Path, images: Iterable[bytes], what: str) -> None:
        self._what = what
        self._ends = array("q")
        size = 0
        with path.open("wb") as file:
            for content in images:
                size += file.write(content)
                self._ends.append(size)
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._ends)

    def content(self, index: int) -> bytes:
        first = self._ends[index - 1] if index else 0
        self._file.seek(first)
        return self._file.read(self._ends[index] - first)

    def name(self, index: int) -> str:
        return f"{self._what}, row {index}"

    def close(self) -> None:
        self._file.close()


def _of_parquet(files: Sequence[SourceFile], spec: SourceSpec, opening: Opening) -> Samples:
    parquet = library("pyarrow.parquet", "images", opening.at)
    pictures = spec.columns.get("inputs", "image")
    labels = spec.columns.get("targets", "" if "inputs" in spec.columns else "label")
    if not isinstance(pictures, str) or not isinstance(labels, str):
        raise BadData(f"{opening.at}.columns: inputs is one column of images, targets one of classes")
    targets: list[int] = []

    def read() -> Iterable[bytes]:
        for file in files:
            with file.open() as opened:
                table = parquet.ParquetFile(opened)
                there = table.schema_arrow.names
                for column in filter(None, (pictures, labels)):
                    if column not in there:
                        raise BadData(
                            f"{opening.at}.columns: there is no column {column!r} in {file.name}; there are "
                            f"{', '.join(there)}"
                        )
                for batch in table.iter_batches(256, columns=[*filter(None, (pictures, labels))]):
                    targets.extend(batch.column(labels).to_pylist() if labels else ())
                    for value in batch.column(pictures).to_pylist():
                        yield (value.get("bytes") if isinstance(value, dict) else value) or b""

    packed = _Packed(opening.spool / "images", read(), spec.source)
    if any(not isinstance(target, int) for target in targets):
        raise BadData(f"{opening.at}.columns.targets: {labels} has values that are no whole numbers")
    return ImageSamples(packed, targets, spec, opening.at, files_digest(files, pictures, labels))
