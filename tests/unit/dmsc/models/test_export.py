"""Versions in the forms that others load: the same tokens, digests that hold, and one line otherwise."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bus.security.signing import is_signed
from dmsc.client.model_folder import read_folder
from dmsc.models.export import export_model
from dmsc.models.forms import ModelForm
from dmsc.models.oci_layout import ARTIFACT, CONFIG, MANIFEST, PATH, WEIGHTS, WEIGHTS_CONFIG
from dmsc.models.signature_check import is_trusted, signature_line
from schemas.errors import BadData, BadInput
from schemas.models.version import (
    ModelFile,
    ModelSignature,
    ModelVersion,
    SignatureTensor,
    signed_bytes,
)
from tests.builders.models import weights_folder


def version_of(folder: Path, **more: Any) -> ModelVersion:
    found = read_folder(folder)
    files = tuple(
        ModelFile(
            name=name,
            bytes=(folder / name).stat().st_size,
            sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        )
        for name in found.files
    )
    fields = {"sha256": found.sha256, "bytes": 1, "tensors": 2, "store": "bus://x", "files": files}
    return ModelVersion.model_validate({"name": "gpt", "version": 4, "registered_at": 1e9, **fields, **more})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transformers_gives_the_same_greedy_tokens(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sizes = {
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    }[family]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, vocab_size=64, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    version = version_of(tmp_path / "in")
    export_model(tmp_path / "in", tmp_path / "out", version, ModelForm.HF)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompt = torch.tensor([[1, 2, 3]])
    tokens = [
        each.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist()
        for each in (model, loaded)
    ]
    assert tokens[0] == tokens[1]
    assert read_folder(tmp_path / "out").sha256 == version.sha256


def test_an_oci_layout_names_everything_by_its_digest(tmp_path: Path) -> None:
    version = version_of(weights_folder(tmp_path / "in", 1))
    line = export_model(tmp_path / "in", tmp_path / "out", version, ModelForm.OCI)

    def blob(descriptor: dict[str, Any]) -> bytes:
        data = (
            tmp_path / "out" / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")
        ).read_bytes()
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == descriptor["digest"]
        assert len(data) == descriptor["size"]
        return data

    assert json.loads((tmp_path / "out" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (described,) = json.loads((tmp_path / "out" / "index.json").read_text())["manifests"]
    assert (described["mediaType"], described["artifactType"]) == (MANIFEST, ARTIFACT)
    assert line.startswith(described["digest"])
    manifest = json.loads(blob(described))
    assert (manifest["artifactType"], manifest["config"]["mediaType"]) == (ARTIFACT, CONFIG)
    config = json.loads(blob(manifest["config"]))
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
    assert config["descriptor"]["name"] == "gpt"
    kinds = {layer["annotations"][PATH]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds == {
        "model.safetensors": WEIGHTS,
        "config.json": WEIGHTS_CONFIG,
        "tokenizer.json": WEIGHTS_CONFIG,
    }
    for layer in manifest["layers"]:
        assert blob(layer) == (tmp_path / "in" / layer["annotations"][PATH]).read_bytes()
    assert len(list((tmp_path / "out" / "blobs" / "sha256").iterdir())) == len(manifest["layers"]) + 2


def test_an_mlflow_folder_has_what_its_loader_asks_for(tmp_path: Path) -> None:
    tensor = SignatureTensor(name="input_ids", dtype="int64", shape=("batch", "tokens"))
    version = version_of(
        weights_folder(tmp_path / "in", 1), signature=ModelSignature(inputs=(tensor,), outputs=(tensor,))
    )
    export_model(tmp_path / "in", tmp_path / "out", version, ModelForm.MLFLOW)
    body = yaml.safe_load((tmp_path / "out" / "MLmodel").read_text())
    flavor = body["flavors"]["transformers"]
    assert (flavor["pipeline_model_type"], flavor["task"]) == ("GPT2LMHeadModel", "text-generation")
    assert (tmp_path / "out" / flavor["model_binary"] / "model.safetensors").exists()
    assert (tmp_path / "out" / "components" / flavor["components"][0] / "tokenizer.json").exists()
    (given,) = json.loads(body["signature"]["inputs"])
    assert given["tensor-spec"] == {"dtype": "int64", "shape": [-1, -1]}
    assert body["metadata"]["dmsc_weights_sha256"] == version.sha256


def test_what_is_not_the_version_does_not_leave(tmp_path: Path) -> None:
    version = version_of(weights_folder(tmp_path / "in", 1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(BadInput, match="not empty"):
        export_model(tmp_path / "in", tmp_path / "full", version, ModelForm.HF)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    with pytest.raises(BadData, match=r"tokenizer\.json: its SHA-256 is"):
        export_model(tmp_path / "in", tmp_path / "out", version, ModelForm.OCI)
    (tmp_path / "in" / "config.json").unlink()
    plain = version_of(tmp_path / "in", factory="workers.models.gpt:byte_gpt")
    with pytest.raises(
        BadInput, match=r"has no config\.json, as workers\.models\.gpt:byte_gpt is no model of"
    ):
        export_model(tmp_path / "in", tmp_path / "out", plain, ModelForm.HF)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "no safetensors"),
        ({"pytorch_model.bin": b""}, "pytorch_model.bin is a pickle"),
        ({"a.safetensors": b"x"}, "not a safetensors file"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "names gone.safetensors",
        ),
        ({"model.safetensors.index.json": b"[]"}, "no index of safetensors"),
    ],
)
def test_a_folder_without_weights_is_one_line(tmp_path: Path, files: dict[str, bytes], text: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises((BadInput, BadData), match=text) as refusal:
        read_folder(tmp_path)
    assert "\n" not in refusal.value.text


def test_a_signature_holds_for_the_content_and_for_keys_of_the_mesh(tmp_path: Path) -> None:
    from nacl.signing import SigningKey

    key = SigningKey(bytes(32))
    public = bytes(key.verify_key).hex()
    plain = version_of(weights_folder(tmp_path / "in", 1))
    signature = bytes(key.sign(signed_bytes(plain)).signature).hex()
    signed = plain.model_copy(update={"signed_by": public, "signed": signature})
    assert is_signed(signed_bytes(plain), public, signature)
    assert is_trusted(signed, [public])
    assert "a former key" in signature_line(signed, ["0" * 64, public])
    assert "NO KEY OF THIS MESH" in signature_line(signed, ["0" * 64])
    noted = signed.model_copy(update={"removed_at": 5.0, "removed_by": "eve"})
    assert is_trusted(noted, [public])
    for change in ({"version": 5}, {"store": "bus://other"}, {"files": ()}, {"sha256": "0" * 64}):
        assert not is_trusted(signed.model_copy(update=change), [public]), change
    assert "not signed" in signature_line(plain, [public])
