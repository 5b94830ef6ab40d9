"""`dmsc policy new`: a policy and its test, from the templates of this package."""

from __future__ import annotations

import keyword
from importlib import resources
from pathlib import Path

from schemas.base import is_token
from schemas.errors import BadInput


def write_policy(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes `folder/name.py` and `folder/test_name.py` (with _ for -); returns their paths.

    Raises:
        BadInput: the name can't be one, or one of the files is there.
    """
    module = name.replace("-", "_").lower()
    if not is_token(name) or not module[0].isalpha() or keyword.iskeyword(module):
        raise BadInput(f"{name}: a policy's name has letters, digits, - and _, and begins with a letter")
    file, test_file = folder / f"{module}.py", folder / f"test_{module}.py"
    for path in (file, test_file):
        if path.exists():
            raise BadInput(f"{path}: is there already; choose another name or folder")
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(word.capitalize() for word in module.split("_") if word) or module,
        "file": file.name,
        "test_file": test_file.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in ((file, "policy.py.template"), (test_file, "test_policy.py.template")):
        text = resources.files("dmsc").joinpath("templates", template).read_text(encoding="utf-8")
        path.write_text(text.format(**words), encoding="utf-8")
    return file, test_file
