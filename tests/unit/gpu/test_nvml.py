"""Cards as NVML tells of them: facts, what others hold, readings under load. Answers are recorded, the code is ours."""

from __future__ import annotations

import inspect

import pynvml
import pytest

from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.gpu import NoDriver, chosen, engine_environment, open_nvml, read_gpus, visible
from tests.support.recorded_nvml import DESKTOP, MIB, SECOND_UUID, UUID, RecordedNvml, mig_card, rtx_4090


def test_the_recording_answers_only_what_pynvml_has_with_the_same_arguments() -> None:
    for name, answer in inspect.getmembers(RecordedNvml(), inspect.ismethod):
        if name.startswith("nvml"):
            real = getattr(pynvml, name)
            wanted = len(inspect.signature(inspect.unwrap(real)).parameters)
            assert len(inspect.signature(answer).parameters) == wanted, name


def test_a_4090_shows_torch_what_the_driver_does_not_reserve() -> None:
    [gpu] = read_gpus(RecordedNvml(rtx_4090()))
    assert gpu.memory_total_bytes == 24_564 * MIB
    assert (
        round(gpu.memory_visible_bytes / 1024**3, 2) == 23.64
    )  # as torch says, see conf/device/rtx4090.yaml
    assert (gpu.compute_capability, gpu.driver, gpu.cuda, gpu.mig) == ("8.9", "580.95.05", "13.0", False)


def test_a_desktop_is_named_once_and_with_what_it_holds() -> None:
    with open_nvml(RecordedNvml(rtx_4090(processes=DESKTOP))) as nvml:
        [gpu] = nvml.gpus()
        found = nvml.processes(gpu)
        assert [(p.name, (p.memory_bytes or 0) // MIB) for p in found] == [
            ("browser", 700), ("Xorg", 412), ("gnome-shell", 286),
        ]  # fmt: skip
        assert nvml.held_bytes(gpu) == (700 + 412 + 286 + 2) * MIB
        assert nvml.free_bytes(gpu) == (24_564 - 354 - 1_400) * MIB
        assert [p.pid for p in nvml.processes(gpu, without={9001})] == [2101, 2388]


def test_slices_are_cards_of_their_own_without_utilization() -> None:
    library = RecordedNvml(mig_card())
    gpus = read_gpus(library)
    assert [gpu.uuid[:12] for gpu in gpus] == ["MIG-00000001", "MIG-00000002"]
    assert all(gpu.mig and gpu.index == 0 and gpu.compute_capability == "8.0" for gpu in gpus)
    with open_nvml(library) as nvml:
        reading = nvml.reading(gpus[0])
    assert reading is not None
    assert (reading["utilization"], reading["power_w"], reading["held_bytes"]) == (None, 371.0, 20 * MIB)


def test_a_card_in_mig_mode_without_slices_is_listed_as_such() -> None:
    [gpu] = read_gpus(RecordedNvml(mig_card() | {"slices": []}))
    assert (gpu.uuid, gpu.mig) == ("GPU-a100", True)


def test_a_driver_that_does_not_tell_what_it_reserves_is_still_read() -> None:
    [gpu] = read_gpus(RecordedNvml(rtx_4090(), driver="470.256.02", cuda=11_040))
    assert gpu.memory_visible_bytes == gpu.memory_total_bytes
    assert gpu.cuda == "11.4"


@pytest.mark.parametrize(
    ("error", "absent", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, "no NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False, "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, False, "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, False, "doesn't answer"),
    ],
)
def test_no_driver_says_why_and_only_a_sick_one_warns(
    error: int, absent: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = RecordedNvml(error=error)
    with pytest.raises(NoDriver, match=words), open_nvml(library):
        pytest.fail("opened")
    assert read_gpus(library) == []
    assert (capsys.readouterr().err == "") == absent


def test_sessions_are_closed() -> None:
    library = RecordedNvml(rtx_4090())
    read_gpus(library)
    assert library.open_sessions == 0


def test_a_lost_card_gives_no_reading() -> None:
    library = RecordedNvml(rtx_4090())
    with open_nvml(library) as nvml:
        [gpu] = nvml.gpus()
        library.cards[0]["uuid"] = "GPU-gone"
        assert nvml.reading(gpu) is None


def test_a_card_that_is_lost_between_two_questions_is_an_unfit_machine() -> None:
    library = RecordedNvml(rtx_4090())
    [gpu] = read_gpus(library)
    library.cards[0]["uuid"] = "GPU-gone"
    with pytest.raises(NoDriver, match="a card stopped answering"), open_nvml(library) as nvml:
        nvml.held_bytes(gpu)
    assert library.open_sessions == 0


def test_which_cards_an_engine_gets() -> None:
    gpus = read_gpus(RecordedNvml(rtx_4090(), rtx_4090(SECOND_UUID)))
    assert visible(gpus, {}) == gpus
    assert chosen(gpus, 1, {}) == gpus[:1]
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": "1,0"}) == gpus[::-1]
    assert chosen(gpus, 1, {"CUDA_VISIBLE_DEVICES": "GPU-4090bbbb"}) == [gpus[1]]
    assert engine_environment([gpus[1]]) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert engine_environment([]) == {}
    with pytest.raises(
        EnvironmentUnfitError, match="2 cards are needed, and 1 visible; CUDA_VISIBLE_DEVICES hides 1"
    ):
        chosen(gpus, 2, {"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(EnvironmentUnfitError, match="1 card is needed, and none visible"):
        chosen(gpus, 1, {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(UserInputError, match=f"names '7'.*0 \\({UUID}\\)"):
        visible(gpus, {"CUDA_VISIBLE_DEVICES": "7"})


def test_a_slice_is_given_by_its_uuid() -> None:
    gpus = read_gpus(RecordedNvml(mig_card()))
    assert engine_environment(gpus[:1])["CUDA_VISIBLE_DEVICES"] == gpus[0].uuid
