"""Opens a source of `kind: text` or `kind: chat`."""

from __future__ import annotations

import torch

from bus.logs import get_logger
from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from schemas.urls import is_kept
from workers.data.data_set.record_files import files_of
from workers.data.samples import Opening
from workers.data.storage.node_cache import shared_folder
from workers.data.text.chat import ChatReader
from workers.data.text.corpus import Corpus, bound_parallelism, stopped_at
from workers.data.text.objectives import MaskedSamples, SpanSamples, span_lengths
from workers.data.text.packing import BestFitPacking, ConcatenatedPacking, SamplePacking, WholePacking
from workers.data.text.template import open_template
from workers.data.text.text_samples import Mask, PackedSamples, SampleForm, TextSamples
from workers.data.text.token_file import TokenFile
from workers.data.text.tokenizer import TextTokenizer, open_tokenizer

log = get_logger("data")

MOST_MASKED_TOKENS = 1 << 14
"""Longer samples have no mask of (tokens, tokens): 256 MiB each."""


def open_text(spec: SourceSpec, opening: Opening) -> PackedSamples:
    """The samples of a source of text or of conversations. Blocks, and takes long when tokens are to be made.

    Raises:
        BadData: The source, the tokenizer or the template is missing or is not what the job says; nothing is
            in it, or less than one sample; or a library is not installed here.
    """
    bound_parallelism(torch.get_num_threads())
    tokenizer = open_tokenizer(spec.tokenizer, spec.eos, opening.fetched)
    _check_tokens(spec, opening, tokenizer)
    chat = None
    if spec.kind == "chat":
        template = open_template(spec.template, spec.template_arguments, tokenizer, opening.fetched)
        chat = ChatReader(template, spec.loss_on)
    files = files_of(spec, opening)
    if not files:
        raise BadData(f"{opening.at}.source {spec.source} is a folder without files")
    corpus = Corpus(files, tokenizer, spec, chat)
    # A node's cache lasts for weeks, and kept requests until their end or their user's word.
    file = corpus.open(None if is_kept(spec.source) else shared_folder(), opening.spool)
    _check(file, spec, opening)
    samples = _samples(file, spec, opening, tokenizer)
    _report(file, samples, spec, opening)
    return samples


def _check_tokens(spec: SourceSpec, opening: Opening, tokenizer: TextTokenizer) -> None:
    """Refuses a tokenizer without the tokens that the targets need, and a mask that no memory holds."""
    if spec.attention_mask == "documents" and spec.sample_tokens > MOST_MASKED_TOKENS:
        raise BadData(
            f"{opening.at}.attention_mask: documents takes sample_tokens² bytes a sample, here "
            f"{spec.sample_tokens**2:,}; it goes up to {MOST_MASKED_TOKENS:,} tokens: use document_ids beyond"
        )
    if spec.targets == "masked":
        tokenizer.mask_id()
    if spec.targets != "spans":
        return
    if tokenizer.eos_id(spec.eos) is None:
        raise BadData(f"{opening.at}.targets: spans end with an end-of-document token; give {opening.at}.eos")
    spans = span_lengths(spec.sample_tokens, spec.mask_fraction, spec.span_tokens).spans
    if (there := len(tokenizer.sentinel_ids())) < spans:
        raise BadData(
            f"{opening.at}.targets: spans of {spec.span_tokens:g} tokens in {spec.sample_tokens} need "
            f"{spans} sentinels, <extra_id_0> …, and the tokenizer {tokenizer.name} has {there}; lower "
            "mask_fraction or sample_tokens, or raise span_tokens"
        )


def _check(file: TokenFile, spec: SourceSpec, opening: Opening) -> None:
    """Refuses what has nothing, or a document that it was told to stop at."""
    account, first = file.account, next(iter(file.bad.values()), "")
    packed = spec.packing_of(spec.kind) != "none"
    if not account.tokens:
        reason = f"no document of it can be read; the first: {first}" if first else "it has no text"
        raise BadData(f"{opening.at}.source {spec.source} is empty: {reason}")
    if first and packed and spec.on_bad_document == "stop":
        raise BadData(stopped_at(first))


def _samples(file: TokenFile, spec: SourceSpec, opening: Opening, tokenizer: TextTokenizer) -> PackedSamples:
    ahead = int(spec.targets == "shifted")
    lengths = span_lengths(spec.sample_tokens, spec.mask_fraction, spec.span_tokens)
    packing = _packing(file, spec, lengths.tokens if spec.targets == "spans" else spec.sample_tokens, ahead)
    if not len(packing):
        raise BadData(_too_short(file, packing, spec, opening))
    form = SampleForm(
        pad=tokenizer.pad_id(),
        shifted=bool(ahead),
        within_documents=spec.attention == "within_documents",
        mask=_mask(spec, packing),
        pad_to_longest=spec.pad_to_longest,
        vocabulary=tokenizer.vocabulary,
    )
    if spec.targets == "masked":
        special = tokenizer.special_ids()
        mask = tokenizer.mask_id()
        return MaskedSamples(
            file, packing, form, fraction=spec.mask_fraction, mask=mask, special=special | {form.pad}
        )
    if spec.targets != "spans":
        return TextSamples(file, packing, form)
    eos = tokenizer.eos_id(spec.eos)
    assert eos is not None
    return SpanSamples(
        file,
        packing,
        form,
        lengths=lengths,
        sample_tokens=spec.sample_tokens,
        eos=eos,
        sentinels=tokenizer.sentinel_ids(),
    )


def _packing(file: TokenFile, spec: SourceSpec, sample_tokens: int, ahead: int) -> SamplePacking:
    packing = spec.packing_of(spec.kind)
    if packing == "concatenate":
        return ConcatenatedPacking(file.offsets, sample_tokens, ahead)
    bad = () if packing == "best_fit" else tuple(file.bad)
    documents = WholePacking(
        file.offsets,
        sample_tokens,
        ahead,
        split=not spec.truncates(spec.kind),
        least=1 if spec.targets == "masked" else 2,
        bad=bad,
    )
    return BestFitPacking(documents) if packing == "best_fit" else documents


def _mask(spec: SourceSpec, packing: SamplePacking) -> Mask:
    if spec.attention_mask != "auto":
        return spec.attention_mask
    padded = packing.padded or spec.targets == "spans"
    return "padding" if padded and spec.attention == "across_documents" else "none"


def _too_short(file: TokenFile, packing: SamplePacking, spec: SourceSpec, opening: Opening) -> str:
    if packing.padded:
        return f"{opening.at}.source {spec.source} has no document of two tokens or more"
    return (
        f"{opening.at}.source {spec.source} has {file.account.tokens:,} tokens, less than one sample of "
        f"{packing.sample_tokens:,} and its successor; give more data, lower {opening.at}.sample_tokens, or "
        f"say {opening.at}.packing: best_fit"
    )


def _report(file: TokenFile, samples: PackedSamples, spec: SourceSpec, opening: Opening) -> None:
    packing, account = samples.packing, file.account
    if packing.truncated:
        log.warning(
            f"{packing.truncated:,} documents are longer than a sample of {packing.sample_tokens:,} tokens "
            f"and are cut short; {opening.at}.long_documents: split keeps the rest",
            source=spec.source,
        )
    log.info(
        "text opened",
        source=spec.source,
        documents=account.documents,
        tokens=account.tokens,
        samples=len(samples),
        vocabulary=samples.vocabulary,
        truncated=packing.truncated,
        too_short=packing.left_out,
        empty=account.empty_documents,
        unreadable=account.bad_documents,
    )
