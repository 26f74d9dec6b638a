"""The parts of the CPU plugin that the orchestrator touches: the path, the metadata, the switch, the log line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline.errors import UserInputError
from pipeline.serving.cpu_plugin import detect, plugin_path, register
from pipeline.serving.signals import PLUGIN_MARK, parse_log

FIND = """
from importlib.metadata import entry_points, version
for point in entry_points(group="vllm.general_plugins"):
    print(point.name, point.value, version("quantgate-cpu-plugin"))
"""


def test_python_finds_the_entry_point_on_the_path_alone(tmp_path):
    environment = {**os.environ, "PYTHONPATH": plugin_path.plugin_pythonpath()}
    found = subprocess.run(
        [sys.executable, "-c", FIND],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    target = f"{register.__name__}:{register.register.__name__}"
    assert found.stdout.splitlines() == [f"quantgate_cpu {target} {pipeline.__version__}"]


def test_the_path_is_absolute_and_begins_with_the_folder_of_the_package():
    root, entry_point = plugin_path.plugin_pythonpath().split(os.pathsep)
    assert Path(root) == Path(pipeline.__file__).resolve().parents[1]
    assert Path(entry_point).is_absolute()
    assert len(list(Path(entry_point).glob("*.dist-info/entry_points.txt"))) == 1


def test_importing_the_path_imports_nothing_heavy():
    code = (
        "import sys; import pipeline.serving.cpu_plugin.plugin_path; "
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    root = Path(pipeline.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_metadata_is_not_ignored_by_git():
    """A common ignore rule hides *.dist-info, and a clone without it would silently lack the plugin."""
    root = Path(pipeline.__file__).resolve().parents[1]
    metadata = next(plugin_path.ENTRY_POINT.glob("*.dist-info/entry_points.txt"))
    done = subprocess.run(["git", "check-ignore", "-q", str(metadata)], cwd=root, check=False)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.returncode == 1


@pytest.mark.parametrize("value", ["auto", "on", "off"])
def test_one_word_is_for_both_parts(value):
    assert detect.modes({detect.VARIABLE: value}) == {"int4": value, "fp8_kv": value}


def test_each_part_has_its_own_word_and_auto_without_one():
    assert detect.modes({}) == {"int4": "auto", "fp8_kv": "auto"}
    assert detect.modes({detect.VARIABLE: "fp8_kv=on"}) == {"int4": "auto", "fp8_kv": "on"}
    assert detect.modes({detect.VARIABLE: "int4=on,fp8_kv=off"}) == {"int4": "on", "fp8_kv": "off"}


@pytest.mark.parametrize("value", ["yes", "int4=yes", "int8=on", "int4=on,off"])
def test_anything_else_is_refused(value):
    with pytest.raises(UserInputError, match=rf"QUANTGATE_CPU_PLUGIN='{value}' isn't one of auto, on, off"):
        detect.modes({detect.VARIABLE: value})


@pytest.mark.parametrize(
    ("needs", "emulated"),
    [
        (detect.Needs(True, True), ("int4_awq_linear", "fp8_kv_attention")),
        (detect.Needs(True, False), ("int4_awq_linear",)),
        (detect.Needs(False, True), ("fp8_kv_attention",)),
        (detect.Needs(False, False), ()),
    ],
)
def test_log_line_is_what_provenance_reads(needs, emulated):
    """Writer and reader of the line live in two environments; this holds them together."""
    assert register.MARK == PLUGIN_MARK
    signals = parse_log(f"INFO 11-29 18:00:00 [register.py:1] {register.MARK} {register.describe(needs)}\n")
    assert signals.emulated == emulated


def test_log_line_texts():
    assert register.describe(detect.Needs(True, True)) == (
        f"active int4_awq_linear=emulated fp8_kv_attention=emulated version={pipeline.__version__}"
    )
    assert register.describe(detect.Needs(False, False)) == "inactive (stock kernels)"
    assert register.describe(detect.Needs(False, False), "toward-zero") == (
        "inactive (stock kernels) fp8_kv_rounding=toward-zero"
    )
