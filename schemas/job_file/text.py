"""Fields of the section `data` for `kind: text` and `kind: chat`: documents become tokens, tokens samples."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from schemas.base import Part
from schemas.marks import HOLDS_USER_VALUES, Url

TextFormat = Literal["auto", "text", "jsonl", "parquet"]
Packing = Literal["auto", "concatenate", "best_fit", "none"]
TextTargets = Literal["shifted", "same", "masked", "spans"]

TIKTOKEN, RANKS = "tiktoken:", ".tiktoken"
"""What names an encoding of tiktoken; what a file of its ranks ends with."""


def _encoding(value: str) -> str:
    try:
        name = codecs.lookup(value).name
    except LookupError:
        raise ValueError(f"{value} is no encoding that Python knows; utf-8 is the usual one") from None
    return value if value.casefold() == "utf-8-sig" else name


def _tokenizer(value: str) -> str:
    """A file of tiktoken's ranks is named by its path alone."""
    name = value.removeprefix(TIKTOKEN)
    if name == value or not ("/" in name or name.endswith(RANKS)):
        return value
    if not name.endswith(RANKS):
        raise ValueError(f"{value}: a file of ranks has the name of its encoding, as cl100k_base{RANKS}")
    return name


class TextSpec(Part):
    """Text as tokens.

    `tokenizer` is `bytes`; `tiktoken:NAME`; or the path or URL of a `tokenizer.json`, of a sentencepiece
    `.model`, of tiktoken's ranks (`cl100k_base.tiktoken`), or of a folder as Hugging Face saves a tokenizer.
    """

    tokenizer: Annotated[Url, AfterValidator(_tokenizer)] = Field(
        "bytes",
        min_length=1,
        max_length=4096,
        description="`bytes`, `tiktoken:NAME`, or a tokenizer's file or folder",
    )
    format: TextFormat = Field(
        "auto", description="what the files are; auto: by their names (.jsonl, .parquet, else text)"
    )
    field: str = Field(
        "",
        max_length=256,
        description="the field of a JSON line, or the column of a Parquet file; a dot goes deeper. "
        "Empty: text; messages for kind chat",
    )
    encoding: Annotated[str, AfterValidator(_encoding)] = Field(
        "utf-8", max_length=32, description="of text files"
    )
    separator: str = Field(
        "", max_length=256, description="splits a text file into documents; empty: a file is a document"
    )
    on_bad_document: Literal["stop", "skip"] = Field(
        "stop",
        description="what becomes of the job when a line or row can't be read and documents are packed: it "
        "is refused with the place, or such documents are left out and counted",
    )
    eos: str = Field(
        "auto",
        max_length=256,
        description="the token behind each document: auto (the tokenizer's own), none, or a token",
    )
    special_tokens: bool = Field(
        False,
        description="whether the tokenizer adds its own special tokens to a document, as [CLS] and [SEP]",
    )
    packing: Packing = Field(
        "auto",
        description="concatenate: windows over all documents; best_fit: whole documents, padded; "
        "none: one document a sample; auto: none for kind chat, else concatenate",
    )
    long_documents: Literal["auto", "split", "truncate"] = Field(
        "auto",
        description="what becomes of a document longer than a sample, unless documents are concatenated; "
        "auto: truncate for kind chat, else split",
    )
    attention: Literal["across_documents", "within_documents"] = Field(
        "across_documents",
        description="within_documents: each document of a sample begins with position 0, and `document_ids` "
        "and `position_ids` say which is which; no target crosses a border",
    )
    attention_mask: Literal["auto", "none", "padding", "documents"] = Field(
        "auto",
        description="padding: (samples, tokens), 1 for a token; documents: (samples, 1, tokens, tokens) "
        "bool; auto: padding, where a sample may have some and attention is across documents",
    )
    targets: TextTargets = Field(
        "shifted",
        description="shifted: the next token; same: the inputs, for models that shift by themselves; "
        "masked: tokens to be restored; spans: T5's spans",
    )
    mask_fraction: float = Field(
        0.15,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="share of the tokens that `targets: masked` or `spans` hides",
    )
    span_tokens: float = Field(
        3.0, ge=1, le=1000, allow_inf_nan=False, description="mean length of a hidden span, in tokens"
    )
    pad_to_longest: bool = Field(
        False, description="pad to the longest sample of the microbatch instead of to sample_tokens"
    )
    template: Url = Field(
        "",
        max_length=65536,
        description="kind chat: the path or URL of a Jinja template; empty: the tokenizer's own; a text with "
        "`{` is the template itself",
    )
    template_arguments: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="further variables of the template"
    )
    loss_on: Literal["answers", "everything"] = Field(
        "answers", description="kind chat: which tokens are targets"
    )

    def misfit(self, kind: str) -> str:
        """Why these fields don't go together, for kind text or chat; empty if they do."""
        packing = self.packing_of(kind)
        if self.targets == "spans" and packing != "concatenate":
            return "targets: spans needs packing: concatenate, as the length of each sample must be known"
        if self.targets == "spans" and self.attention == "within_documents":
            return "targets: spans does not go with attention: within_documents, as a span may cross a border"
        if self.targets == "spans" and self.attention_mask == "documents":
            return "targets: spans does not go with attention_mask: documents, as a span may cross a border"
        if self.targets == "masked" and self.pad_to_longest:
            return "pad_to_longest does not go with targets: masked, whose samples are made one by one"
        if packing == "concatenate" and self.pad_to_longest:
            return "pad_to_longest has nothing to pad with packing: concatenate"
        return ""

    def packing_of(self, kind: str) -> Packing:
        """The packing, without `auto`."""
        return self.packing if self.packing != "auto" else "none" if kind == "chat" else "concatenate"

    def truncates(self, kind: str) -> bool:
        """Whether a long document is cut short."""
        return self.long_documents == "truncate" or (self.long_documents == "auto" and kind == "chat")

    def text_urls(self) -> dict[str, str]:
        """Field → URL of the files that these fields name; without names that are no files."""
        found = {}
        if is_tokenizer_file(self.tokenizer):
            found["tokenizer"] = self.tokenizer
        if self.template and not is_template_text(self.template):
            found["template"] = self.template
        return found


def is_tokenizer_file(tokenizer: str) -> bool:
    """Whether a tokenizer is a file or folder, not a name."""
    return tokenizer != "bytes" and not tokenizer.startswith(TIKTOKEN)


def is_template_text(template: str) -> bool:
    """Whether `template` is the template itself, not where it is."""
    return "{{" in template or "{%" in template
