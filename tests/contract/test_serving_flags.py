"""Every variant's command line through the installed engine's own parser, configuration and choice of kernels.

A renamed flag, a changed default, a backend that doesn't take a KV dtype any more: it fails here, not at a start-up on a card
that isn't at hand. The card is emulated (tests/support/emulated_card.py); the code that decides is vLLM's.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.capacity.overheads import Drivers
from pipeline.compatibility import Engine, attention_backends, weight_format, weight_kernel
from pipeline.planning.card import card_of, drivers_of
from pipeline.planning.scenario import geometry_of, row_of
from pipeline.results import Capacity, PlanRow
from pipeline.serving.command import ServeSpec, build_command, build_environment
from pipeline.serving.engine import locked_engine
from pipeline.serving.failures import failure_cause
from pipeline.serving.flags import flag_table
from pipeline.serving.signals import parse_log
from pipeline.settings import Settings, load_settings
from pipeline.settings.compose import profiles
from pipeline.stages import context
from tests.support.checkpoint_configs import write_config
from tests.support.environments import environment_python
from tests.support.sample_results import environment as machine

REPOSITORY = Path(__file__).resolve().parents[2]
RTX_4090 = {
    "name": "NVIDIA GeForce RTX 4090", "capability": [8, 9], "memory_bytes": 24_210 * 2**20, "multiprocessors": 128,
}  # fmt: skip
ADA = Engine(locked_engine()[1], "cuda", 89)
HEAD_DIM = 128  # of the models that are served on a card: Qwen2.5-7B has 3584 / 28


def in_engine(argv: dict[str, list[str]], card: dict[str, Any] | None, build: bool | str) -> dict[str, Any]:
    """One process of the serve environment for all command lines: importing vLLM takes 10 s."""
    spec = ServeSpec(
        locked_engine()[1], Path("x"), "x", "cpu" if card is None else "cuda", 16, 1, kv_cache_memory_bytes=1
    )
    environment = build_environment(spec, {"PATH": os.environ["PATH"], "HOME": str(Path.home())})
    done = subprocess.run(
        [environment_python("serve"), "-m", "tests.support.engine_child"],
        input=json.dumps({"card": card, "argv": argv, "build": build}),
        # With a card: the cubins count as there, else vLLM asks a server of NVIDIA's for them.
        env=environment | {"VLLM_HAS_FLASHINFER_CUBIN": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@dataclass(frozen=True)
class Served:
    """A profile's variants: their servers, and what the engine makes of each."""

    settings: Settings
    specs: dict[str, ServeSpec]
    answers: dict[str, Any]


@pytest.fixture(scope="module", params=profiles())
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Every variant of a profile as the stages serve it, its checkpoint reduced to the config.json that decides."""
    settings = load_settings([f"profile={request.param}"])
    folder = tmp_path_factory.mktemp(request.param)
    for scheme in {variant.weights for variant in settings.variants.values()}:
        write_config(settings, scheme, folder / scheme)
    specs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "weights_folder", lambda scheme: folder / scheme)
        for name, variant in settings.variants.items():
            budget = row_of(settings, variant, geometry_of(settings), card_of(settings, variant)).budget.bytes
            row = PlanRow.model_construct(capacity=Capacity.model_construct(kv_budget_bytes=budget))
            specs[name] = context.serve_spec(settings, variant, row, machine())
    argv = {
        name: [*build_command(spec, "python", 8123)[3:], "--skip-tokenizer-init"]
        for name, spec in specs.items()
    }
    card = RTX_4090 if settings.device.kind == "cuda" else None
    answers = in_engine(argv, card, build=True)
    assert not [answer["error"] for answer in answers.values() if "error" in answer]
    return Served(settings, specs, answers)


def test_every_field_arrives(served: Served) -> None:
    for name, spec in served.specs.items():
        got = served.answers[name]["parsed"]
        for field in (
            "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "enforce_eager", "seed", "kv_cache_memory_bytes",
            "block_size", "max_num_batched_tokens",
        ):  # fmt: skip
            assert got[field] == getattr(spec, field), (name, field)
        assert got["model"] == str(spec.model_dir)
        assert got["served_model_name"] == [name]
        assert (got["host"], got["port"]) == ("127.0.0.1", 8123)
        assert got["quantization"] is None
        assert got["generation_config"] == "vllm"
        assert got["disable_uvicorn_access_log"] is True
        assert got["gpu_memory_utilization"] == (
            spec.gpu_memory_utilization or 0.92
        )  # 0.92: the engine's own default


def test_the_engine_is_configured_as_the_variant_means_it(served: Served) -> None:
    settings = served.settings
    for name, spec in served.specs.items():
        got = served.answers[name]["config"]
        assert got["kv_cache_dtype"] == settings.variants[name].kv_cache_dtype, name
        assert got["block_size"] == settings.server.block_size, name
        assert got["max_model_len"] == settings.server.max_model_len, name
        assert got["max_num_seqs"] == settings.server.max_num_seqs, name
        assert got["prefix_caching"] is False, name
        assert got["dtype"] == f"torch.{settings.server.dtype}", name
        assert got["kv_cache_memory_bytes"] == spec.kv_cache_memory_bytes, name
        if settings.server.max_num_batched_tokens is not None:
            assert got["max_num_batched_tokens"] == settings.server.max_num_batched_tokens, name
        recipe = settings.quantizers.get(settings.variants[name].weights)
        assert (got["quantization"] is None) == (recipe is None), (name, got["quantization"])


def test_the_planners_overheads_come_from_the_engines_own_configuration(served: Served) -> None:
    """Per variant: the runner, tokens a step, sequences, captured sizes and attention backend that vLLM itself ends up with."""
    settings = served.settings
    for name, variant in settings.variants.items():
        got, layers = served.answers[name]["config"], served.answers[name]["layers"]
        drivers = drivers_of(settings, variant)
        assert (drivers is None) == (settings.device.kind == "cpu"), name
        if drivers is None:
            assert got["capture_sizes"] == [], "a plan of the demo has no graphs in it"
            continue
        assert (got["v2_unsupported"] == []) is drivers.v2, name
        assert got["max_num_batched_tokens"] == drivers.max_num_batched_tokens, name
        assert got["max_num_seqs"] == drivers.max_num_seqs, name
        assert tuple(got["capture_sizes"]) == drivers.capture_sizes, name
        assert got["cudagraph_mode"] == "FULL_AND_PIECEWISE", "decode batches are captured once more, whole"
        assert set(layers["attention_backend"]) == {drivers.backend}, name
        terms = {term.name for term in card_of(settings, variant).overheads}
        assert terms == {"buffers", "activation", "non_torch", "sampler", "cuda_graphs"}, name


def test_capture_sizes_are_the_engines_whatever_moves_them(tmp_path: Path) -> None:
    """Off the grid of sizes, below the batched tokens, on a Hopper card, and eager: vLLM's own configuration beside the planner's."""
    settings = load_settings(["profile=rtx4090"])
    write_config(settings, "bf16", tmp_path / "bf16")
    cases = [(128, 2048, False), (1, 2048, False), (100, 2048, False), (33, 2048, False), (256, 8192, False), (300, 2048, False),
             (1024, 8192, False), (16, 24, False), (128, 100, False), (128, 2048, True)]  # fmt: skip
    argv = {
        f"{seqs} {tokens} {eager}": [
            "--model", str(tmp_path / "bf16"), "--skip-tokenizer-init", "--max-model-len", "64", "--max-num-seqs", str(seqs),
            "--max-num-batched-tokens", str(max(tokens, seqs)), *(["--enforce-eager"] if eager else []),
        ]
        for seqs, tokens, eager in cases
    }  # fmt: skip
    answers = in_engine(argv, RTX_4090, build="config")
    for name, (seqs, tokens, eager) in zip(argv, cases, strict=True):
        got = answers[name]["config"]
        drivers = Drivers((0, 32), max(tokens, seqs), seqs, eager, capability=89)
        assert tuple(got["capture_sizes"] or ()) == drivers.capture_sizes, name
        assert got["cudagraph_mode"] == ("NONE" if eager else "FULL_AND_PIECEWISE"), name


def test_every_layer_runs_on_the_kernel_that_the_variant_means(served: Served) -> None:
    """The backend that our own table expects (FlashAttention for BF16, FlashInfer for FP8, Triton for scales per token and head),
    or the pinned one; weights on the kernel that our table names for their format, no layer left out."""
    settings = served.settings
    on_card = settings.device.kind == "cuda"
    layers = settings.model.config["num_hidden_layers"]  # type: ignore[index]
    for name, spec in served.specs.items():
        got = served.answers[name]["layers"]
        # On a CPU the plugin's backend carries the stock one's name.
        expected = (
            attention_backends(spec.kv_cache_dtype, ADA, HEAD_DIM)[0].backend if on_card else "CPU_ATTN"
        )
        if "--attention-backend" in spec.extra_args:
            expected = spec.extra_args[spec.extra_args.index("--attention-backend") + 1]
        assert got["attention_backend"] == {expected: layers}, name
        assert got["kv_cache_dtype"] == {spec.kv_cache_dtype: layers}, name
        quantized = {kernel: count for kernel, count in got["linear"].items() if "Unquantized" not in kernel}
        recipe = settings.quantizers.get(settings.variants[name].weights)
        if recipe is None or not recipe.quantizes_weights:
            assert quantized == {}, name
            continue
        assert sum(quantized.values()) == 4 * layers, (name, quantized)  # qkv, o, gate and up, down
        if on_card:
            row = weight_kernel(ADA, weight_format(recipe))
            assert row is not None
            assert {kernel.rsplit(".", 1)[1] for kernel in quantized} == {row.kernel}, name


def test_a_pinned_variant_differs_from_its_twin_in_nothing_but_the_cache(served: Served) -> None:
    """What `awq-pinned` and `awq-triton` are for: the attention backend of an 8-bit cache under a 16-bit one."""
    pinned = [name for name, spec in served.specs.items() if "--attention-backend" in spec.extra_args]
    for name in pinned:
        weights = served.settings.variants[name].weights
        twins = [
            other for other, variant in served.settings.variants.items()
            if variant.weights == weights and variant.kv_cache_dtype != "bfloat16"
            and served.answers[other]["layers"]["attention_backend"] == served.answers[name]["layers"]["attention_backend"]
        ]  # fmt: skip
        assert twins, f"{name} pins a backend, but no quantized cache on {weights} weights runs on it"
        for twin in twins:
            ours, theirs = served.answers[name]["layers"], served.answers[twin]["layers"]
            assert ours["linear"] == theirs["linear"], (name, twin)


def test_the_log_says_what_the_layers_are(served: Served) -> None:
    """`parse_log` on the lines that the installed version writes while it chooses: a changed text fails here."""
    if served.settings.device.kind == "cpu":
        return  # on a CPU it names neither; the recorded logs (tests/unit/serving/test_signals.py) hold what it says
    for name, answer in served.answers.items():
        said = parse_log(answer["log"])
        assert {said.attention_backend} == set(answer["layers"]["attention_backend"]), (name, answer["log"])
        kernels = {
            kernel.rsplit(".", 1)[1] for kernel in answer["layers"]["linear"] if "Unquantized" not in kernel
        }
        assert ({said.weights_kernel} if said.weights_kernel else set()) == kernels, (name, answer["log"])


def test_the_block_size_costs_no_backend(served: Served) -> None:
    """vLLM falls back to a slower backend, with a warning, where the block size that it is told doesn't suit the better one."""
    for name, answer in served.answers.items():
        assert "precluded" not in answer["log"], name


def test_a_kernel_that_is_not_there_is_named(tmp_path: Path) -> None:
    """What the engine says on a card whose backends don't take the cache, in the sentence that a stage would end with."""
    settings = load_settings(["profile=rtx4090"])
    write_config(settings, "bf16", tmp_path / "bf16")
    common = [
        "--model",
        str(tmp_path / "bf16"),
        "--skip-tokenizer-init",
        "--max-model-len",
        "8192",
        "--kv-cache-dtype",
    ]
    argv = {"pinned": [*common, "fp8", "--attention-backend", "FLASH_ATTN"], "none": [*common, "fp8_ds_mla"]}
    answers = in_engine(argv, RTX_4090, build=True)
    assert failure_cause(answers["pinned"]["error"], 1).startswith(
        "the pinned attention backend FLASH_ATTN can't serve this: kv_cache_dtype not supported"
    )
    assert failure_cause(answers["none"]["error"], 1).startswith(
        "no attention backend of this card keeps a fp8_ds_mla KV cache (FLASH_ATTN: kv_cache_dtype not supported"
    )


def test_fp8_weights_on_a_card_without_fp8_units(tmp_path: Path) -> None:
    """Before 8.9 the engine keeps activations at 16 bits and widens the weights: the kernel that our table says."""
    settings = load_settings(["profile=rtx4090-full"])
    write_config(settings, "fp8", tmp_path / "fp8")
    card = RTX_4090 | {"name": "NVIDIA GeForce RTX 3090", "capability": [8, 6]}
    argv = ["--model", str(tmp_path / "fp8"), "--skip-tokenizer-init", "--max-model-len", "8192"]
    [answer] = in_engine({"fp8": argv}, card, build=True).values()
    assert "error" not in answer, answer.get("error")
    row = weight_kernel(Engine(locked_engine()[1], "cuda", 86), "float-quantized")
    assert row is not None
    kernels = {name.rsplit(".", 1)[1] for name in answer["layers"]["linear"] if "Unquantized" not in name}
    assert kernels == {row.kernel}


def test_prefix_caching_parallelism_and_pinning_arrive() -> None:
    spec = ServeSpec(
        engine_version=locked_engine()[1],
        model_dir=Path("/models/some"),
        served_name="bf16",
        target="cuda",
        max_model_len=8192,
        max_num_seqs=128,
        gpu_memory_utilization=0.9,
        tensor_parallel=2,
        pipeline_parallel=2,
        enforce_eager=False,
        extra_args=("--attention-backend", "FLASHINFER"),
    )
    argv = {
        str(caching): build_command(replace(spec, prefix_caching=caching), "python", 1)[3:]
        for caching in (True, False)
    }
    for caching, answer in in_engine(argv, None, build=False).items():
        got = answer["parsed"]
        assert str(got["enable_prefix_caching"]) == caching
        assert "FLASHINFER" in got["attention_backend"]
        assert (got["tensor_parallel_size"], got["pipeline_parallel_size"]) == (2, 2)
        assert (got["gpu_memory_utilization"], got["max_num_batched_tokens"]) == (0.9, None)


def test_the_recorded_flags_are_the_installed_parsers() -> None:
    """What `pipeline/serving/flags/vllm.tsv` says of the locked release, against its parser: no flag more, none less."""
    code = (
        "import json; from pipeline.serving.flags.record import installed_flags, installed_version; "
        "print(json.dumps([installed_version(), installed_flags()]))"
    )
    done = subprocess.run(
        [environment_python("serve"), "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    version, flags = json.loads(done.stdout.splitlines()[-1])
    assert version == locked_engine()[1]
    assert flag_table().flags(version) == flags
