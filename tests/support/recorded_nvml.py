"""The functions of pynvml that we call, answered from a written-down machine instead of a driver.

Figures of the RTX 4090 are those of public `nvidia-smi -q` output: 24,564 MiB of which 354 are reserved. What a card doesn't
answer is left out of its dict and raises NVML's own NotSupported, as pynvml does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1024**2
UUID = "GPU-4090aaaa-0000-0000-0000-000000000001"
SECOND_UUID = "GPU-4090bbbb-0000-0000-0000-000000000002"
CONSTANTS = (
    "NVMLError", "NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "NVML_ERROR_NO_PERMISSION", "NVML_DEVICE_MIG_ENABLE", "NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU",
    "nvmlMemory_v2", "nvmlClocksEventReasonGpuIdle", "nvmlClocksEventReasonApplicationsClocksSetting",
    "nvmlClocksEventReasonSwPowerCap", "nvmlClocksEventReasonHwSlowdown", "nvmlClocksEventReasonSyncBoost",
    "nvmlClocksEventReasonSwThermalSlowdown", "nvmlClocksEventReasonHwThermalSlowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown", "nvmlClocksEventReasonDisplayClockSetting",
)  # fmt: skip
DESKTOP = {
    2101: ("/usr/lib/xorg/Xorg", 412),
    2388: ("/usr/bin/gnome-shell", 286),
    9001: ("/opt/browser/browser", 700),
}


def rtx_4090(uuid: str = UUID, **changes: Any) -> dict[str, Any]:
    """One idle, headless card. Memory in MiB; `processes`: pid -> (path, MiB or None)."""
    card = {
        "uuid": uuid, "name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "total": 24_564, "reserved": 354,
        "processes": {}, "unnamed": 2, "sm_clock": 2_520, "memory_clock": 10_251, "temperature": 61, "power_mw": 371_000,
        "power_limit_mw": 450_000, "utilization": 97, "reasons": pynvml.nvmlClocksEventReasonSwPowerCap,
    }  # fmt: skip
    return card | changes


def mig_card() -> dict[str, Any]:
    """An A100 of 40 GB cut into two halves; NVML has no utilization in MIG mode."""
    slices = [
        {
            "uuid": f"MIG-0000000{number}-0000-0000-0000-000000000000", "name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
            "total": 19_968, "reserved": 17, "processes": {}, "unnamed": 20,
        }
        for number in (1, 2)
    ]  # fmt: skip
    whole = rtx_4090("GPU-a100", name="NVIDIA A100-SXM4-40GB", capability=(8, 0), total=40_960, reserved=509)
    del whole["utilization"]
    return whole | {"slices": slices}


class RecordedNvml:
    """Stands in for the module `pynvml`. `cards` may be changed between calls, as cards change."""

    def __init__(
        self, *cards: dict[str, Any], driver: str = "580.95.05", cuda: int = 13_000, error: int | None = None
    ) -> None:
        self.cards = copy.deepcopy(list(cards))
        self.driver, self.cuda, self.error = driver, cuda, error
        self.open_sessions = 0
        for name in CONSTANTS:
            setattr(self, name, getattr(pynvml, name))

    # --- session ----------------------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        for device in self._devices():
            if pid in device["processes"]:
                return str(device["processes"][pid][0])
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    # --- handles: the dicts themselves ------------------------------------------------------------------------

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for device in self._devices():
            if device["uuid"] == uuid:
                return device
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> list[int]:
        if "slices" not in card:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(card["slices"]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card["slices"][index]  # type: ignore[no-any-return]

    # --- answers ----------------------------------------------------------------------------------------------

    def nvmlDeviceGetUUID(self, device: dict[str, Any]) -> str:
        return str(device["uuid"])

    def nvmlDeviceGetName(self, device: dict[str, Any]) -> str:
        return str(device["name"])

    def nvmlDeviceGetCudaComputeCapability(self, device: dict[str, Any]) -> tuple[int, int]:
        return device["capability"]  # type: ignore[no-any-return]

    def nvmlDeviceGetMemoryInfo(self, device: dict[str, Any], version: int | None = None) -> Any:
        if version is not None and int(self.driver.split(".")[0]) < 510:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        used = device["unnamed"] + sum(size or 0 for _, size in device["processes"].values())
        free = device["total"] - device["reserved"] - used
        values = {"total": device["total"] * MIB, "free": free * MIB, "used": used * MIB}
        return SimpleNamespace(**values, **({"reserved": device["reserved"] * MIB} if version else {}))

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict[str, Any]) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if size is None else size * MIB)
            for pid, (_, size) in device["processes"].items()
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: dict[str, Any]) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses(device)[:1]

    def nvmlDeviceGetClockInfo(self, device: dict[str, Any], which: int) -> int:
        return int(
            self._value(
                device, {pynvml.NVML_CLOCK_SM: "sm_clock", pynvml.NVML_CLOCK_MEM: "memory_clock"}[which]
            )
        )

    def nvmlDeviceGetTemperature(self, device: dict[str, Any], sensor: int) -> int:
        return int(self._value(device, "temperature"))

    def nvmlDeviceGetPowerUsage(self, device: dict[str, Any]) -> int:
        return int(self._value(device, "power_mw"))

    def nvmlDeviceGetEnforcedPowerLimit(self, device: dict[str, Any]) -> int:
        return int(self._value(device, "power_limit_mw"))

    def nvmlDeviceGetUtilizationRates(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=self._value(device, "utilization"), memory=0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: dict[str, Any]) -> int:
        return int(self._value(device, "reasons"))

    def _value(self, device: dict[str, Any], key: str) -> Any:
        if key not in device:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device[key]

    def _devices(self) -> Iterator[dict[str, Any]]:
        for card in self.cards:
            yield card
            yield from card.get("slices", [])
