"""What the stage `quantize` would refuse: asked of the same functions, before a model is fetched and an hour is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.compatibility import Request, quantizer_refusals
from pipeline.doctor.check import Check, ok, unfit, warn, wrong
from pipeline.doctor.model import model_folder
from pipeline.errors import UserInputError
from pipeline.planning.scenario import geometry_of
from pipeline.quality.tasks import refuse_leaks
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.calibration import (
    MIN_HELDOUT_TOKENS,
    calibration_pieces,
    heldout_pieces,
    kv_pieces,
    refuse_chats,
    refuse_overlap,
)
from pipeline.quantize.room import GIB, Need, card_of, needs, room_for, stored_element_bytes
from pipeline.runs import RUNS
from pipeline.settings import Settings
from pipeline.texts import read_texts

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of text in a token: about 4 characters in English (help.openai.com, "What are tokens"), and as many bytes of CJK
text, a character or two, in a vocabulary that has been trained on some."""
UNSURE = 1.25
"""How far such an estimate may be off before the stage refuses what doctor let pass."""


def check_room(settings: Settings, nvml: Any = None) -> Iterator[Check]:
    """For every quantizer: the disk, the memory and the card's memory that it takes, against what is free now.

    Of a profile for cards it is what a card's quantization takes, also on a machine without one. `nvml` stands in for pynvml.
    """
    if not settings.quantizers or settings.model.config is None:
        return
    sizes, element_bytes = geometry_of(settings), stored_element_bytes(settings.model.config)
    kind = settings.device.kind
    card = card_of(kind, nvml)
    for scheme, recipe in settings.quantizers.items():
        if quantizer_refusals(sizes, Request.of(recipe, settings.server.tensor_parallel)):
            continue  # `check_quantizers` says why
        folder = _checkpoint(settings, scheme)
        room = room_for(sizes, recipe, on_cuda=kind == "cuda", element_bytes=element_bytes)
        yield from _room(f"room {scheme}", list(needs(room, folder, card)), made=folder.is_dir())


def _checkpoint(settings: Settings, scheme: str) -> Path:
    """Where the stage puts it."""
    return RUNS / settings.profile / "weights" / scheme


def _room(name: str, asked: list[Need], *, made: bool) -> Iterator[Check]:
    """Too little room is no failure where the checkpoint is `made`: the stage may not have to run again."""
    short = [need for need in asked if not need.is_met]
    if not short:
        parts = ", ".join(
            f"{need.needed_bytes / GIB:.1f} GiB {need.what} ({need.free_bytes / GIB:.1f} free)"
            for need in asked
        )
        yield ok(name, f"quantizing takes about {parts}")
    for need in short:
        if made:
            yield warn(name, f"the checkpoint is there; to quantize again takes about {need}", need.fix)
        else:
            yield unfit(name, f"quantizing takes about {need}", need.fix)


def check_overlap(settings: Settings) -> Iterator[Check]:
    """Whether held-out text is calibration text too."""
    if not settings.quantizers:
        return
    texts = settings.calibration
    refuse_overlap(texts.file, texts.heldout_file)
    yield ok("calibration text", f"no text of {texts.heldout_file} is in {texts.file}")


def check_leaks(settings: Settings) -> Iterator[Check]:
    """Whether items of the team's eval set are calibration text too."""
    if not settings.quantizers or settings.evalset.folder is None:
        return
    refuse_leaks(settings)
    yield ok(
        "calibration and eval items",
        f"no item of {settings.evalset.folder} is in {settings.calibration.file}",
    )


def check_tokens(settings: Settings) -> Iterator[Check]:
    """Whether calibration and held-out text hold as many tokens as are needed.

    Counted as the stage does where the model's tokenizer is at hand, else guessed from the text's bytes.
    """
    if not settings.quantizers:
        return
    folder = model_folder(settings)
    tokenizer = None if folder is None else _tokenizer(folder)
    requests = {
        scheme: QuantizeRequest.of(settings, scheme, folder or Path(), _checkpoint(settings, scheme))
        for scheme in settings.quantizers
    }
    for scheme, request in requests.items():
        recipe, needed = request.recipe, request.recipe.min_effective_tokens
        asked: list[tuple[str, int, Callable[[QuantizeRequest, Any], tuple[list[list[int]], Any]]]] = []
        if recipe.searches_weights:
            asked.append((f"calibration tokens {scheme}", recipe.sequence_tokens, calibration_pieces))
        if recipe.calibrate_kv_scales and not (recipe.searches_weights and recipe.kv_samples is None):
            asked.append((f"KV calibration tokens {scheme}", recipe.kv_text[1], kv_pieces))
        for name, length, pieces_of in asked:
            if tokenizer is None:
                yield _guessed(name, request.calibration_file, request.chat_template, max(needed, length))
            else:
                yield _counted(name, lambda *given: pieces_of(*given)[0], request, tokenizer, needed)  # noqa: B023
    name, request = "held-out tokens", next(iter(requests.values()))
    if tokenizer is None:
        yield _guessed(name, request.heldout_file, request.chat_template, MIN_HELDOUT_TOKENS)
    else:
        yield _counted(name, heldout_pieces, request, tokenizer, MIN_HELDOUT_TOKENS)


def _counted(
    name: str,
    pieces_of: Callable[[QuantizeRequest, Any], list[list[int]]],
    request: QuantizeRequest,
    tokenizer: Any,
    needed: int,
) -> Check:
    try:
        tokens = sum(map(len, pieces_of(request, tokenizer)))
    except UserInputError as error:
        return wrong(name, str(error), "")
    return ok(name, f"{tokens} tokens are used, by the model's own tokenizer; {needed} are needed")


def _guessed(name: str, path: Path, chat_template: bool, needed: int) -> Check:
    """Too few, or nearly so, is only a warning: another tokenizer makes more or fewer of the same bytes."""
    try:
        texts = read_texts(path)
        if not chat_template:
            refuse_chats(texts, path)
    except UserInputError as error:
        return wrong(name, str(error), "")
    tokens = sum(len(text.text.encode()) for text in texts) // BYTES_PER_TOKEN
    found = (
        f"{path}: about {tokens} tokens, guessed as the model's tokenizer isn't at hand; {needed} are needed"
    )
    if tokens < UNSURE * needed:
        return warn(name, found, "add text, or ask again once the stage prepare has run")
    return ok(name, found)


def _tokenizer(folder: Path) -> Any:
    """The model's tokenizer, as the quantizers' environments load it; None for a broken one, which the model's check names."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return None
