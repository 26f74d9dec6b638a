"""What a better perplexity costs: the demo's model quantized at several settings, one after another on this machine.

Uses the checked model of `runs/demo/weights/bf16` (the stage `prepare` puts it there) and makes it in a temporary folder
otherwise. Every row goes through the same proof; its gates are opened, so that a bad setting is a row and no error.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.environments import interpreter
from pipeline.environments.build import environment_folder, is_complete
from pipeline.models.prepare import prepare
from pipeline.quantize.base import QuantizeRequest, backend, quantize
from pipeline.settings import Settings, load_settings
from pipeline.settings.schema import QuantizeRecipe

OPEN: dict[str, Any] = {
    "max_perplexity_ratio": 10.0,
    "max_share_of_rounding_loss": None,
    "effective_error_range": (0.0, 0.99),
    "layer_error_range": (0.0, 0.99),
    "min_effective_tokens": 1,
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"samples": 16, "sequence_tokens": 128},
    {"samples": 64, "sequence_tokens": 128},
    {"samples": 16, "sequence_tokens": 128, "clip_search": True},
    {"samples": 32, "sequence_tokens": 128, "clip_search": True},
    {"samples": 64, "sequence_tokens": 128, "clip_search": True},
    {"samples": 16, "sequence_tokens": 512, "clip_search": True},
    {"samples": 32, "sequence_tokens": 128, "clip_search": True, "group_size": 32},
    {"samples": 16, "sequence_tokens": 128, "backend": "llmcompressor"},
    {"samples": 16, "sequence_tokens": 128, "clip_search": True, "backend": "llmcompressor"},
    {"samples": 16, "sequence_tokens": 128, "backend": "llmcompressor", "method": "gptq"},
    {"samples": 64, "sequence_tokens": 256, "backend": "llmcompressor", "method": "gptq"},
    {
        "samples": 16,
        "sequence_tokens": 128,
        "backend": "llmcompressor",
        "method": "gptq",
        "zero_point": False,
    },
    {"backend": "llmcompressor", "method": "fp8", "bits": 8, "group_size": None, "zero_point": False},
)
"""On top of AWQ with 4 bits, groups of 64, no clipping, by AutoAWQ. The pairs of one setting in both backends are matched."""


def main() -> None:
    settings = load_settings(["profile=demo"])
    print(
        f"{'backend':14} {'method':6} {'group':>5} {'tokens':>13} {'clip':>5} {'quantize s':>10} {'ratio':>7} {'rounded':>8} "
        f"{'share':>6} {'layers %':>12} {'MiB':>6} {'peak GiB':>8}"
    )
    with tempfile.TemporaryDirectory(prefix="quantgate-bench-") as folder:
        model = demo_model(settings, Path(folder))
        for changes in SETTINGS:
            recipe = QuantizeRecipe(**{"group_size": 64, "clip_search": False, **OPEN, **changes})
            environment = backend(recipe.backend).environment
            if not is_complete(environment_folder(environment)):
                print(
                    f"{recipe.backend:14} left out: `python3 -m pipeline.environments {environment}` builds it"
                )
                continue
            _row(settings, model, Path(folder) / "out", recipe)


def demo_model(settings: Settings, folder: Path) -> Path:
    """The demo's checked model, made in `folder` where the profile's run hasn't."""
    at_hand = Path("runs/demo/weights/bf16")
    if not (at_hand / "config.json").is_file():
        at_hand = folder / "model"
        prepare(settings.model.source, at_hand, interpreter("serve"), log_path=folder / "prepare.log")
    return at_hand


def _row(settings: Settings, model: Path, out: Path, recipe: QuantizeRecipe) -> None:
    request = QuantizeRequest(
        scheme="bench",
        model_dir=model,
        out_dir=out,
        calibration_file=Path(settings.calibration.file),
        heldout_file=Path(settings.calibration.heldout_file),
        chat_template=settings.calibration.chat_template,
        recipe=recipe,
    )
    python = interpreter(backend(recipe.backend).environment)
    record = quantize(request, python, log_path=out.parent / "quantize.log")
    found, used, layers = record.perplexity, record.calibration, record.effective_error.per_layer
    text = "none" if used is None else f"{used.effective_samples} x {used.sequence_tokens}"
    share = "" if found.share_of_rounding_loss is None else f"{found.share_of_rounding_loss:.0%}"
    print(
        f"{record.backend:14} {recipe.method:6} {record.group_size or '':>5} {text:>13} "
        f"{'yes' if recipe.clip_search else 'no':>5} {record.quantize_wall_s:>10.0f} {found.ratio:>7.4f} "
        f"{found.round_to_nearest or 0:>8.4f} {share:>6} {100 * min(layers):>5.1f} to {100 * max(layers):.1f} "
        f"{record.weight_bytes / 2**20:>6.1f} {record.peak_memory_bytes / 2**30:>8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
