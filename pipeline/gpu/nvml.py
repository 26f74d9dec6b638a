"""One NVML session, and what is asked of it.

`library` is the module `pynvml` of nvidia-ml-py, or in tests an object with the same functions that answers from a
recording. A question that a card doesn't answer (a GeForce has no MIG, a slice no utilization) gives None.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from pipeline.errors import EnvironmentUnfitError
from pipeline.results import Gpu, GpuProcess

Answer = TypeVar("Answer")


class NoDriver(EnvironmentUnfitError):
    """There is no NVIDIA driver, or it doesn't answer; the message says which."""

    absent = False
    """True: none is installed, as on any machine without a card."""


@contextlib.contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """An NVML session; `NoDriver` where there is none."""
    if library is None:
        import pynvml

        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        failure = NoDriver(_why_no_driver(library, error))
        failure.absent = getattr(error, "value", None) == library.NVML_ERROR_LIBRARY_NOT_FOUND
        raise failure from None
    try:
        yield Nvml(library)
    except library.NVMLError as error:
        raise NoDriver(f"a card stopped answering ({error}); nvidia-smi and dmesg may say why") from None
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def read_gpus(library: Any = None) -> list[Gpu]:
    """The machine's cards in PCI bus order; none without a driver, with a warning where there is one that doesn't answer."""
    try:
        with open_nvml(library) as nvml:
            return nvml.gpus()
    except NoDriver as error:
        if not error.absent:
            print(f"warning: {error}", file=sys.stderr)
        return []


def _why_no_driver(library: Any, error: Exception) -> str:
    known = {
        library.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver: libnvidia-ml.so.1 was not found",
        library.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded (`modprobe nvidia`)",
        library.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated under the running kernel module: reboot",
        library.NVML_ERROR_NO_PERMISSION: "no permission to talk to the NVIDIA driver (/dev/nvidiactl)",
    }
    return known.get(getattr(error, "value", None), f"the NVIDIA driver doesn't answer: {error}")


class Nvml:
    """What we ask; made by `open_nvml`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def gpus(self) -> list[Gpu]:
        """Every card; one that is cut into MIG slices gives its slices, or itself (`mig`, no slice) where it has none."""
        found = []
        for index in range(self._library.nvmlDeviceGetCount()):
            card = self._library.nvmlDeviceGetHandleByIndex(index)
            slices = self._slices(card)
            for handle in slices or [card]:
                found.append(self._describe(handle, card, index, mig=bool(slices) or self._mig_is_on(card)))
        return found

    def held_bytes(self, gpu: Gpu) -> int:
        """Memory of the card that is taken, what driver and firmware reserve not counted."""
        total, reserved, free = self._memory(self._handle(gpu))
        return total - reserved - free

    def free_bytes(self, gpu: Gpu) -> int:
        return self._memory(self._handle(gpu))[2]

    def processes(self, gpu: Gpu, without: Collection[int] = ()) -> list[GpuProcess]:
        """Who holds memory of the card, most first; a process that computes and draws is listed once."""
        handle = self._handle(gpu)
        listed: dict[int, int | None] = {}
        for ask in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for entry in self._ask(getattr(self._library, ask), handle) or []:
                listed[entry.pid] = entry.usedGpuMemory
        found = [
            GpuProcess(pid=pid, name=self._process_name(pid), memory_bytes=used)
            for pid, used in listed.items()
            if pid not in without
        ]
        return sorted(found, key=lambda process: -(process.memory_bytes or 0))

    def power_limit_w(self, gpu: Gpu) -> float | None:
        limit = self._ask(lambda: self._library.nvmlDeviceGetEnforcedPowerLimit(self._card(gpu)))
        return None if limit is None else limit / 1000

    def reading(self, gpu: Gpu) -> dict[str, Any] | None:
        """The card now, None if it is lost. Clocks in MHz, degrees Celsius, W, utilization 0..1, `reasons` by name."""
        return self._ask(self._reading, gpu)

    def _reading(self, gpu: Gpu) -> dict[str, Any]:
        library, card = self._library, self._card(gpu)
        power = self._ask(library.nvmlDeviceGetPowerUsage, card)
        rates = self._ask(library.nvmlDeviceGetUtilizationRates, self._handle(gpu))
        bits = self._ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, card)
        return {
            "uuid": gpu.uuid,
            "sm_clock_mhz": self._ask(library.nvmlDeviceGetClockInfo, card, library.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask(library.nvmlDeviceGetClockInfo, card, library.NVML_CLOCK_MEM),
            "temperature_c": self._ask(library.nvmlDeviceGetTemperature, card, library.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "utilization": None if rates is None else rates.gpu / 100,
            "held_bytes": self._ask(lambda: self.held_bytes(gpu)),
            "reasons": None if bits is None else _reasons(library, bits),
        }

    # --- handles ----------------------------------------------------------------------------------------------

    def _handle(self, gpu: Gpu) -> Any:
        return self._library.nvmlDeviceGetHandleByUUID(gpu.uuid)

    def _card(self, gpu: Gpu) -> Any:
        """The card under a slice: clocks, power and temperature are the whole card's."""
        return self._library.nvmlDeviceGetHandleByIndex(gpu.index)

    def _mig_is_on(self, card: Any) -> bool:
        modes = self._ask(self._library.nvmlDeviceGetMigMode, card)
        return bool(modes and modes[0] == self._library.NVML_DEVICE_MIG_ENABLE)

    def _slices(self, card: Any) -> list[Any]:
        if not self._mig_is_on(card):
            return []
        most = self._ask(self._library.nvmlDeviceGetMaxMigDeviceCount, card) or 0
        found = [
            self._ask(self._library.nvmlDeviceGetMigDeviceHandleByIndex, card, index) for index in range(most)
        ]
        return [handle for handle in found if handle is not None]

    def _describe(self, handle: Any, card: Any, index: int, *, mig: bool) -> Gpu:
        library = self._library
        total, reserved, _ = self._memory(handle)
        major, minor = library.nvmlDeviceGetCudaComputeCapability(card)
        cuda = library.nvmlSystemGetCudaDriverVersion_v2()
        return Gpu(
            index=index,
            uuid=_text(library.nvmlDeviceGetUUID(handle)),
            name=_text(library.nvmlDeviceGetName(handle)),
            memory_total_bytes=total,
            memory_visible_bytes=total - reserved,
            compute_capability=f"{major}.{minor}",
            driver=_text(library.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            mig=mig,
        )

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """(total, reserved by driver and firmware, free) in bytes. Drivers before 510 don't tell what they reserve."""
        library = self._library
        info = self._ask(lambda: library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2))
        if info is not None:
            return int(info.total), int(info.reserved), int(info.free)
        info = library.nvmlDeviceGetMemoryInfo(handle)
        return int(info.total), 0, int(info.free)

    def _process_name(self, pid: int) -> str | None:
        name = self._ask(self._library.nvmlSystemGetProcessName, pid)
        return _text(name).split("/")[-1] if name else None

    def _ask(self, question: Callable[..., Answer], *arguments: Any) -> Answer | None:
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None


def _reasons(library: Any, bits: int) -> list[str]:
    """Names of the reasons why the clocks are where they are (nvml.h, nvmlClocksEventReasons)."""
    named = {
        "idle": library.nvmlClocksEventReasonGpuIdle,
        "clocks set by hand": library.nvmlClocksEventReasonApplicationsClocksSetting,
        "power limit": library.nvmlClocksEventReasonSwPowerCap,
        "hardware slowdown": library.nvmlClocksEventReasonHwSlowdown,
        "sync boost": library.nvmlClocksEventReasonSyncBoost,
        "heat": library.nvmlClocksEventReasonSwThermalSlowdown,
        "heat, in hardware": library.nvmlClocksEventReasonHwThermalSlowdown,
        "power brake": library.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "display": library.nvmlClocksEventReasonDisplayClockSetting,
    }
    return [name for name, bit in named.items() if bits & bit]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
