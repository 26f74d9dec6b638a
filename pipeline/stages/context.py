"""What every stage needs: the checked settings of its profile, and where its files stand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.compatibility import weight_format
from pipeline.environments import interpreter, on_device
from pipeline.errors import EnvironmentUnfitError, UserInputError, run_main
from pipeline.gpu import lowest_capability
from pipeline.laps import process_age_s
from pipeline.lifetime import end_with_dvc
from pipeline.quality.batching import INVARIANT
from pipeline.results import Environment, PlanRow, StageTime, load, save
from pipeline.runs import point_at
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import check_running
from pipeline.serving.kernel_choice import plugin_mode
from pipeline.serving.kv_scales import check_kv_cache
from pipeline.serving.signals import LogSignals
from pipeline.serving.weight_kernel import check_weight_kernel
from pipeline.settings import Settings, VariantSettings, check_graph, load_settings

if TYPE_CHECKING:
    from pipeline.report.bundle import ResultBundle

RESULTS = Path("results")
WEIGHTS = Path("artifacts/weights")
LOGS = RESULTS / "logs"
TIMES = RESULTS / "time"


def stage_main(run: Callable[[Settings, str], None], item: str | None = None) -> int:
    """Entry point of a stage, which is given a profile and its item: `run(settings, item)`.

    `item` names the kind of item, None when there is none.
    """

    def body() -> None:
        end_with_dvc()
        stage, given = Path(sys.argv[0]).stem, sys.argv[1:]
        if len(given) != (2 if item else 1):
            raise UserInputError(
                f"this stage takes a profile{f' and one {item}' if item else ''}, given were {given}"
            )
        settings = load_settings([f"profile={given[0]}"])
        check_graph(settings)
        point_at(settings.profile)
        time_file = TIMES / f"{'@'.join([stage, *given[1:]])}.json"
        time_file.unlink(missing_ok=True)  # a run that is aborted has no time, nor an earlier one's
        run(settings, given[1] if item else "")
        _keep_time(time_file)

    return run_main(body)


def _keep_time(path: Path) -> None:
    """When this stage's process began and how long it took, beside the results: no stage depends on it."""
    age = process_age_s()
    started_at = datetime.now(UTC) - timedelta(seconds=age)
    save(path, StageTime(stage=path.stem, started_at=started_at, wall_s=round(age, 2)))


def variant_of(settings: Settings, name: str) -> VariantSettings:
    """The variant called `name`; `UserInputError` lists the profile's."""
    try:
        return settings.variants[name]
    except KeyError:
        raise UserInputError(
            f"variant {name!r} isn't in the profile {settings.profile}; it has {', '.join(settings.variants)}"
        ) from None


def python_of(settings: Settings, environment: str) -> Path:
    """The Python of an environment, as the profile's device needs it."""
    return interpreter(on_device(environment, settings.device.kind))


def weights_folder(scheme: str) -> Path:
    """Where the stages `prepare` and `quantize` put the checkpoint of a weights scheme."""
    folder = WEIGHTS / scheme
    if not (folder / "config.json").is_file():
        raise EnvironmentUnfitError(f"{folder}: no checkpoint there; `dvc repro` makes it")
    return folder


def environment() -> Environment:
    """The machine's record, as the stage `environment` left it."""
    return load(RESULTS / "environment.json", Environment)


def planned(name: str) -> PlanRow:
    """The planner's row for a variant, as the stage `plan` left it."""
    return load(RESULTS / "plan" / f"{name}.json", PlanRow)


def serve_spec(
    settings: Settings, variant: VariantSettings, row: PlanRow, machine: Environment | None = None
) -> ServeSpec:
    """How `variant` is served. A CPU gets the pool that the planner's budget leaves; a card sizes its own.

    `machine` (default: the stage `environment`'s record) says whose kernels a CPU runs.
    """
    server, device = settings.server, settings.device
    on_cpu = device.kind == "cpu"
    return ServeSpec(
        engine_version=server.engine_version,
        model_dir=weights_folder(variant.weights),
        served_name=variant.name,
        target=device.kind,
        max_model_len=server.max_model_len,
        max_num_seqs=server.max_num_seqs,
        kv_cache_dtype=variant.kv_cache_dtype,
        dtype=server.dtype,
        kv_cache_memory_bytes=row.capacity.kv_budget_bytes if on_cpu else None,
        gpu_memory_utilization=None if on_cpu else device.memory_utilization,
        max_num_batched_tokens=server.max_num_batched_tokens,
        block_size=server.block_size,
        tensor_parallel=server.tensor_parallel,
        pipeline_parallel=server.pipeline_parallel,
        enforce_eager=server.enforce_eager,
        seed=server.seed,
        extra_args=variant.engine_args,
        environment=server.environment,
        cpu_plugin=plugin_mode((machine or environment()).kernels) if on_cpu else "auto",
    )


def pool_bytes(row: PlanRow, blocks: int | None) -> int | None:
    """Bytes, on one rank, of a pool of so many blocks; None where the engine didn't say how many it has."""
    size = row.capacity.block_bytes
    return None if blocks is None or size is None else blocks * size


def check_served(
    settings: Settings, variant: VariantSettings, spec: ServeSpec, log: LogSignals, log_path: Path
) -> None:
    """Refuse a server that isn't what the variant means: another version, another KV cache, other kernels for its weights."""
    check_running(spec, log.version)
    check_kv_cache(
        variant.name,
        spec.model_dir,
        variant.kv_cache_dtype,
        variant.kv_scales,
        log,
        log_path,
        variant.skipped_layers,
    )
    # In its batch-invariant mode the engine leaves the fast kernels on purpose (`quality.batching`).
    if settings.quantizes(variant) and INVARIANT not in spec.environment:
        capability = lowest_capability(environment().gpus) if spec.target == "cuda" else None
        check_weight_kernel(
            spec, weight_format(settings.quantizers[variant.weights]), capability, log, log_path
        )


def bundle(settings: Settings) -> ResultBundle:
    """Everything the report and the tracking show: all results, and the settings behind them."""
    from pipeline.report.bundle import load_bundle

    groups = ("policy", "slo", "load", "evalset", "server", "device")
    facts = {group: getattr(settings, group).model_dump(mode="json") for group in groups}
    facts["model"] = {"name": settings.model.name, **settings.model.source.model_dump(mode="json")}
    facts["variants"] = {name: variant.description for name, variant in settings.variants.items()}
    return load_bundle(RESULTS, facts)
