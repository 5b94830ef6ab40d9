"""`dmsc model register|import|export`: what enters the registry, and what leaves it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.commands.models.versions import VersionArgument
from dmsc.console.command_app import argument, option
from dmsc.console.exit_codes import bad_input
from dmsc.console.option_groups import GatewayOptions, GatewayQuery
from dmsc.console.options import print_text
from dmsc.models.forms import ModelForm

if TYPE_CHECKING:
    from schemas.models.commands import ModelRegistered
    from schemas.models.version import ModelSignature

PATIENCE = timedelta(minutes=15).total_seconds()
"""How long a command waits until weights are read: a minute for some 25 GB."""
NameArgument = Annotated[str, argument("NAME", "The model; a new name becomes yours.")]
NotesOption = Annotated[str, option("--notes TEXT", "What the version says about itself.")]
TokenizerOption = Annotated[
    str | None,
    option("--tokenizer SHA256", "Register only if the tokenizer beside the weights has this digest."),
]
SignatureOption = Annotated[
    Path | None, option("--signature FILE", "JSON with inputs, outputs, vocabulary, context.")
]


def register(
    name: NameArgument,
    job: Annotated[str | None, option("--job JOB", "A finished job, whose weights become a version.")] = None,
    source: Annotated[
        str | None, option("--from FOLDER|URL", "A folder of safetensors, here or where the mesh reads it.")
    ] = None,
    signature: SignatureOption = None,
    tokenizer: TokenizerOption = None,
    notes: NotesOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Make a version of weights: all bytes are read, and compared with their digest.

    Weights that are a version of this model already give that version.

    Example: dmsc model register stdlib-gpt --job j1a2b3c
    """
    if (job is None) == (source is None):
        raise bad_input("give either --job JOB or --from FOLDER|URL")
    _register(
        mesh,
        name,
        job=job,
        folder=source,
        signature=_signature(signature),
        tokenizer_sha256=tokenizer,
        notes=notes,
    )


def import_(
    name: NameArgument,
    folder: Annotated[Path, argument("FOLDER", "A folder as Hugging Face saves a model.")],
    tokenizer: TokenizerOption = None,
    notes: NotesOption = "",
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Make a version of a folder of Hugging Face's, with its config and tokenizer.

    Example: dmsc model import llama ~/models/llama
    """
    _register(mesh, name, folder=folder, tokenizer_sha256=tokenizer, notes=notes)


def _register(mesh: GatewayQuery, name: str, **how: Any) -> None:
    from dmsc.console.running import run_async
    from schemas.models.reference import refuse_name

    refuse_name(name)

    async def registered() -> ModelRegistered:
        async with mesh.client(timeout_s=PATIENCE, patience_s=PATIENCE) as client:
            return await client.register_model(name, **how)

    found = run_async(registered())
    version = found.version
    text = "registered" if found.new else "the registry has it already"
    mesh.show(found, f"{version.reference} {version.sha256[:12]}: {text}")


def _signature(file: Path | None) -> ModelSignature | None:
    from pydantic import ValidationError

    from schemas.explain import explain
    from schemas.models.version import ModelSignature

    if file is None:
        return None
    try:
        return ModelSignature.model_validate_json(file.read_bytes())
    except OSError as error:
        raise bad_input(f"--signature {file}: {error.strerror}") from None
    except ValidationError as error:
        raise bad_input(f"--signature {file}: {explain(error, ModelSignature)[0]}") from None


def export(
    what: VersionArgument,
    out: Annotated[Path, argument("DIR", "The folder to write, which is new or empty.")],
    form: Annotated[
        ModelForm,
        option(
            "--to FORM",
            "hf: for from_pretrained. oci: an OCI layout (ModelPack), for oras. mlflow: for "
            "mlflow.transformers.load_model.",
        ),
    ] = ModelForm.HF,
    mesh: GatewayOptions = GatewayOptions(),
) -> None:
    """Write a version in the form that somebody else loads. Its bytes are compared with their digests first.

    Example: dmsc model export stdlib-gpt@production --to oci stdlib-gpt-oci
    """
    from tempfile import TemporaryDirectory

    from dmsc.console.running import run_async
    from dmsc.models.export import export_model, require_empty
    from schemas.models.version import ModelVersion

    require_empty(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="dmsc-model-", dir=out.parent) as scratch:

        async def fetched() -> ModelVersion:
            async with mesh.client(timeout_s=PATIENCE) as client:
                return await client.download_model(what, Path(scratch))

        version = run_async(fetched())
        line = export_model(Path(scratch), out, version, form)
    print_text(f"{version.reference} → {out}: {line}")
