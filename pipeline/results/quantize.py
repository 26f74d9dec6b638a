"""Stage `quantize`: what was done, and the proof of it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipeline.results.record import Record


class CalibrationUsed(Record):
    """What a quantizer really calibrated on."""

    file: str
    sha256: str
    texts: int = Field(description="in the file")
    chats: int = Field(description="of these, chats")
    chat_template: bool = Field(description="whether they went through the model's chat template")
    available_tokens: int = Field(description="of all texts")
    effective_samples: int = Field(description="sequences that the backend was given")
    effective_tokens: int = Field(description="tokens in them")
    sequence_tokens: int = Field(description="tokens of each")


class TextFile(Record):
    """A file of texts by content."""

    file: str
    sha256: str


class ModuleCount(Record):
    """Modules that the architecture says must be quantized, and how many are."""

    expected: int
    found: int
    missing: list[str]


class FiniteScan(Record):
    """Floating-point tensors looked through, and NaN or infinite values in them."""

    tensors_scanned: int
    found: int


class ModuleError(Record):
    module: str
    value: float


class LayerError(Record):
    layer: int
    value: float


class EffectiveError(Record):
    """Relative weight error, where AWQ folded scales with that undone: ||W_effective - W|| / ||W||."""

    per_layer: list[float] = Field(description="mean over a layer's modules")
    layer_range: tuple[float, float] | None = Field(
        description="what a layer may have; null where no weight is quantized"
    )
    worst_layer: LayerError
    worst: ModuleError
    mean: float = Field(description="over all modules")


class QuantizedPerplexity(Record):
    """On held-out text, all computed in one run on the same windows. FP8's includes the rounding of its activations."""

    original: float
    quantized: float
    ratio: float = Field(description="quantized / original")
    limit: float = Field(description="the recipe's for the ratio")
    round_to_nearest: float | None = Field(
        description="perplexity ratio of plain rounding at the same bits and groups; null where no weight is quantized, or is "
        "plainly rounded itself (fp8)"
    )
    share_of_rounding_loss: float | None = Field(
        description="(ratio - 1) / (round_to_nearest - 1); null where rounding loses under 1 %"
    )
    share_of_rounding_loss_limit: float | None = Field(description="the recipe's; null: recorded only")
    heldout_tokens: int = Field(description="tokens predicted")
    window_tokens: int


class Saturation(Record):
    """The scale beyond whose range most of the keys or values seen lie."""

    scale: str = Field(description="its name in the checkpoint")
    share: float = Field(description="of the values seen")
    limit: float


class KvScales(Record):
    """FP8 scales of keys and values, one each per layer, held against held-out text. Ranges are over the layers."""

    layers: int
    key: tuple[float, float]
    value: tuple[float, float]
    coverage: tuple[float, float] = Field(description="448 * scale / the largest value seen")
    saturated: Saturation
    largest_key: float = Field(description="magnitude; at scale 1.0 what is beyond 448 saturates")
    largest_value: float


class Quantization(Record):
    """`results/quantize/<scheme>.json`: what was done, and the proof of it read back from the checkpoint."""

    scheme: str
    backend: str
    versions: dict[str, str]
    recipe: dict[str, Any]
    calibration: CalibrationUsed | None = Field(
        description="what the weights were searched on; null where no text is needed for them"
    )
    kv_calibration: CalibrationUsed | None = Field(
        default=None, description="what the KV scales were calibrated on; null where there are none"
    )
    heldout: TextFile
    device: str
    format: str = Field(description="checkpoint layout, as config.json's quant_method says")
    bits: int
    group_size: int | None = Field(
        description="null where no weight is quantized, or each output has one scale"
    )
    zero_point: bool | None
    activations: str | None = Field(
        default=None, description="dtype that the engine rounds activations to; null: they stay at 16 bits"
    )
    quantized_modules: ModuleCount
    unquantized_modules: dict[str, str] = Field(
        description="matrix that stays as it is -> its dtype, or the table that it shares"
    )
    nan_inf: FiniteScan
    effective_error: EffectiveError
    perplexity: QuantizedPerplexity
    kv_scales: KvScales | None = Field(default=None, description="null where the checkpoint has none")
    weight_bytes: int = Field(description="of all tensors of the checkpoint")
    predicted_weight_bytes: int = Field(description="the planner's, which must agree within 1 %")
    original_weight_bytes: int
    size_on_disk_bytes: int = Field(description="of the folder: headers and tokenizer too")
    wall_s: float
    quantize_wall_s: float
    proof_wall_s: float
    peak_memory_bytes: int = Field(description="host memory, the larger of quantizing and proving")
    peak_device_memory_bytes: int | None = Field(description="on CUDA")
