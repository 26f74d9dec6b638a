"""The calibration text in the form of a server's requests: the same texts, in turns, as long as the deployment's context."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pipeline.quality.tasks import refuse_leaks
from pipeline.quantize.calibration import refuse_overlap
from pipeline.settings import load_settings
from pipeline.texts import load_texts, read_texts

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "evalsets/calibration"
ASKING = ("Go on with this:", "请接着写：")
CHARACTERS_PER_TOKEN = 3.4  # of these texts in SmolLM2's vocabulary: 141,196 bytes of JSON hold 37,487 tokens


@pytest.mark.parametrize(("plain", "chats"), [("calibration", "chats"), ("heldout", "heldout-chats")])
def test_nothing_is_lost_or_added_but_the_asking(plain: str, chats: str) -> None:
    texts, found = load_texts(FOLDER / f"{plain}.jsonl"), read_texts(FOLDER / f"{chats}.jsonl")
    said = "".join(content for chat in found for _, content in chat.messages)
    for words in ASKING:
        said = said.replace(words, "")
    wanted = re.sub(r"^(User|Assistant): ", "", "\n".join(texts.values()), flags=re.MULTILINE)
    assert Counter(re.sub(r"\s", "", said)) == Counter(re.sub(r"\s", "", wanted))


@pytest.mark.parametrize("chats", ["chats", "heldout-chats"])
def test_the_roles_take_turns_and_a_chat_fills_the_context(chats: str) -> None:
    found = read_texts(FOLDER / f"{chats}.jsonl")
    for chat in found:
        roles = [role for role, _ in chat.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2), chat.id
        assert all(content.strip() for _, content in chat.messages), chat.id
    assert 6_000 < max(len(chat.text) for chat in found) / CHARACTERS_PER_TOKEN < 8_192


def test_held_out_chats_and_eval_items_are_not_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_overlap(FOLDER / "chats.jsonl", FOLDER / "heldout-chats.jsonl")
    monkeypatch.chdir(ROOT)
    settings = load_settings(["profile=rtx4090"], ROOT)
    assert settings.calibration.file.endswith("/chats.jsonl")
    refuse_leaks(settings)


def test_the_kv_scales_of_the_card_are_of_the_deployments_length() -> None:
    settings = load_settings(["profile=rtx4090-full"], ROOT)
    recipes = [recipe for recipe in settings.quantizers.values() if recipe.calibrate_kv_scales]
    assert len(recipes) == 3
    for recipe in recipes:
        samples, tokens = recipe.kv_text
        assert (tokens, samples * tokens) == (settings.server.max_model_len, 32_768)
