"""The process that writes weights in another form: what it refuses is one line here."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.client.weight_forms import write_form
from schemas.errors import BadModel
from tests.builders.jobs import gpt, spec


def test_a_job_without_adapters_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"the job has no adapters \(model\.args\.lora\)") as caught:
        write_form(spec(model=gpt()), tmp_path, tmp_path / "out", "merge")
    assert "\n" not in caught.value.text
    assert not (tmp_path / "out").exists()
