"""What the machine is said to have, by a fake NVML: which cards can be used, and when ``auto`` refuses to be a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fake_nvml import A100, H200, Card, FakeNvml, Process, uuid_of
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.axes import Hardware
from repro_matrix.environment.machine import Machine, cgroup_held, cgroup_limits, detect
from repro_matrix.environment.nvml import Nvml, states, without_peers
from repro_matrix.environment.profiles import Profile, settle, settle_all, together
from repro_matrix.environment.system_checks import warnings
from repro_matrix.errors import ConfigError
from repro_matrix.launch.attempt import RUN_TOKEN

KNOWN = catalogue.load().hardware
HARNESS = Path(catalogue.__file__).parents[1]
Root = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A machine's root folder with these files in it."""

    def make(**files: str) -> Path:
        for path, text in files.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="ascii")
        return tmp_path

    return make


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    """The machine with these cards, under these environment variables."""

    def detected(nvml: FakeNvml, root: Path | None = None, **env: str) -> Machine:
        nvml.install(monkeypatch)
        return detect(env, root or tmp_path / "nothing")

    return detected


Look = Callable[..., Machine]
NO_LIBRARY = FakeNvml(init_error=12)


@pytest.mark.parametrize(
    "cards, profile",
    [
        ([Card() for _ in range(8)], "a100x8"),
        ([Card(H200)], "gpu1"),
        ([Card(), Card(), Card(H200), Card(H200)], "gpu4"),
        ([Card(), Card(), Card(), Card(mig=["MIG-1"])], "gpu3"),  # the card in MIG mode is left out
        ([*(Card() for _ in range(7)), Card(lost=True)], "gpu7"),
        ([Card(), Card(mode="prohibited"), Card()], "gpu2"),
        ([Card(lost=True), Card()], "gpu1"),
        ([Card(recovery=2), Card()], "gpu1"),
        ([Card(remap_failed=True), Card()], "gpu1"),
        ([Card(mode="exclusive_process"), Card()], "gpu2"),  # nobody is on it: one rank may be
        ([Card(mode="exclusive_process", processes=[Process(99999999)]), Card()], "gpu1"),
        ([Card(processes=[Process(99999999, 70000)]), Card()], "gpu2"),  # busy: the scheduler's business
    ],
)
def test_auto_takes_what_can_be_used(cards: list[Card], profile: str, look: Look) -> None:
    assert settle("auto", KNOWN, look(FakeNvml(cards))).name == profile


@pytest.mark.parametrize("count, used", [(9, 8), (16, 8), *((n, n) for n in range(1, 9))])
def test_cards_that_stay_unused_are_named_and_why(count: int, used: int, look: Look) -> None:
    """3 or 6 cards were gpu2 or gpu4 without a word about the rest, and arms of three ranks lacked one of three."""
    found = settle("auto", KNOWN, look(FakeNvml([Card(H200) for _ in range(count)])))
    assert len(found.gpus) == used and len(found.idle) == count - used
    told, why = found.words(), found.why_idle()
    if count == used:
        assert "unused" not in told and why is None
    else:
        assert f"({used} x {H200}; {count - used} more stay" in told and " unused), backend nccl" in told
        assert why and all(f"GPU {index} ({H200})" in why for index in range(used, count)), why
        assert f"has {used} of the {count} that can be used" in why
    explicit = settle("gpu2", KNOWN, look(FakeNvml([Card(processes=[Process(99999999, 4321)]), Card(), Card()])))
    assert [gpu.index for gpu in explicit.gpus] == [1, 2] and [gpu.index for gpu in explicit.idle] == [0]
    assert not settle("cpu", KNOWN, look(FakeNvml([Card()]))).why_idle()


def test_a_card_says_what_it_is(look: Look) -> None:
    machine = look(FakeNvml([Card(persistence=False), Card(H200)], driver="535.129.03", cuda=12020))
    assert (machine.driver, machine.cuda) == ("535.129.03", "12.2")
    one, other = machine.gpus
    assert (one.index, one.name, one.uuid, one.memory_mb) == (0, A100, uuid_of(0), 81920)
    assert (one.capability, one.mode, one.persistence) == ("8.0", "default", False)
    assert (other.capability, other.persistence) == ("9.0", True)


REFUSED = {
    "the driver is not loaded": (FakeNvml(init_error=9), {}, "Driver Not Loaded"),
    "library and driver differ": (FakeNvml(init_error=18), {}, "version mismatch"),
    "NVML fails later": (FakeNvml([Card()], error=999), {}, "Unknown Error"),
    "all in MIG mode": (FakeNvml([Card(mig=["MIG-a"])]), {}, "GPU 0 .*MIG mode"),
    "a MIG device": (FakeNvml([Card(mig=["MIG-a"])]), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, "names a MIG device"),
    "all": (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": "all"}, "'all' is a word of NVIDIA_VISIBLE_DEVICES"),
    "no such GPU": (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": "1"}, "'1', which is no GPU"),
    "no such UUID": (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": "GPU-ffff"}, "'GPU-ffff', which is no GPU"),
    "ambiguous": (
        FakeNvml([Card(uuid="GPU-aa1"), Card(uuid="GPU-aa2")]), {"CUDA_VISIBLE_DEVICES": "GPU-aa"},
        "begins the UUIDs of 2 GPUs",
    ),
    "twice": (FakeNvml([Card(), Card()]), {"CUDA_VISIBLE_DEVICES": "0,1,0"}, "names a device twice"),
    "order": (FakeNvml([Card(), Card(H200)]), {"CUDA_VISIBLE_DEVICES": "0"}, "set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    "prohibited": (FakeNvml([Card(mode="prohibited")]), {}, "compute mode is prohibited"),
    "held": (FakeNvml([Card(mode="exclusive_process", processes=[Process(99999999)])]), {}, "pid 99999999"),
    "lost": (FakeNvml([Card(lost=True)]), {}, "GPU is lost"),
    "not to be told apart": (FakeNvml([Card(uuid="GPU-a"), Card(uuid="GPU-a")]), {}, "2 cards say that they are GPU-a"),
    "a container without NVML": (NO_LIBRARY, {"NVIDIA_VISIBLE_DEVICES": "all"}, "libraries have to be handed in"),
    "a list, and no NVML": (NO_LIBRARY, {"CUDA_VISIBLE_DEVICES": "0"}, "'0', which is no GPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_auto_never_becomes_the_cpu_without_a_word(name: str, look: Look) -> None:
    nvml, env, said = REFUSED[name]
    machine = look(nvml, **env)
    with pytest.raises(ConfigError, match=said) as error:
        settle("auto", KNOWN, machine)
    assert "hardware=cpu runs" in str(error.value)
    assert settle("cpu", KNOWN, machine).name == "cpu"


SIGNS = {
    "dev/nvidia0": ("", "device nodes /dev/nvidia0"),
    "proc/driver/nvidia/gpus/0000:07:00.0/information": ("", "the kernel's driver shows 1 GPU"),
    "proc/driver/nvidia/version": ("NVRM", "the kernel's driver is loaded"),
    "dev/dxg": ("", "WSL"),
}


@pytest.mark.parametrize("path", SIGNS)
def test_signs_of_gpus_without_nvml_are_an_error(path: str, look: Look, root: Root) -> None:
    text, said = SIGNS[path]
    with pytest.raises(ConfigError, match=said):
        settle("auto", KNOWN, look(FakeNvml(init_error=12), root(**{path: text})))


def test_a_card_on_the_bus_without_a_driver_is_a_sign(look: Look, root: Root) -> None:
    pci = "sys/bus/pci/devices/0000:07:00.0"
    with pytest.raises(ConfigError, match=r"PCI bus at 0000:07:00\.0"):
        settle("auto", KNOWN, look(NO_LIBRARY, root(**{f"{pci}/vendor": "0x10de\n", f"{pci}/class": "0x030200\n"})))


@pytest.mark.parametrize(
    "nvml, env, files",
    [
        (NO_LIBRARY, {}, {}),
        (NO_LIBRARY, {}, {"dev/nvidia-caps/x": "", "sys/bus/pci/devices/a/vendor": "0x10de", "dev/nvidiactl": ""}),
        (NO_LIBRARY, {"NVIDIA_VISIBLE_DEVICES": "void"}, {}),
        (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": ""}, {"dev/nvidia0": ""}),
        (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        (FakeNvml([Card()]), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}),
        (FakeNvml(init_error=9), {"CUDA_VISIBLE_DEVICES": ""}, {}),
    ],
)
def test_the_cpu_where_there_is_no_gpu_or_none_is_wished(
    nvml: FakeNvml, env: dict[str, str], files: dict[str, str], look: Look, root: Root
) -> None:
    assert settle("auto", KNOWN, look(nvml, root(**files), **env)).name == "cpu"


def test_ranks_do_not_share_a_card_that_lets_one_process_in(look: Look) -> None:
    """Two ranks on it failed in set_device, attempt after attempt."""
    exclusive, usual = look(FakeNvml([Card(mode="exclusive_process")])), look(FakeNvml([Card()]))
    assert [profile.name for profile in settle_all(["auto"], KNOWN, usual)] == ["gpu1", "gpu1-shared", "cpu"]
    found = settle_all(["auto"], KNOWN, exclusive)
    assert [profile.name for profile in found] == ["gpu1", "cpu"]
    assert warnings(found[0], 4096) == [
        "GPU 0 is in exclusive_process mode: ranks cannot share it (nvidia-smi -c 0)",
    ]
    with pytest.raises(ConfigError, match="compute mode is exclusive_process, so that ranks cannot share it"):
        settle("gpu1-shared", KNOWN, exclusive)


def test_a_gpu_profile_says_why_cards_are_not_usable(look: Look) -> None:
    two = FakeNvml([Card(), Card(mode="prohibited")])
    with pytest.raises(ConfigError, match=r"needs 2 GPUs; this machine has: NVIDIA A100.*prohibited.*hardware=cpu"):
        settle("gpu2", KNOWN, look(two))
    with pytest.raises(ConfigError, match=r"needs 8 GPUs; .*'9', which is no GPU \(there are 8\)"):
        settle("gpu8", KNOWN, look(FakeNvml([Card() for _ in range(8)]), CUDA_VISIBLE_DEVICES="0,1,9"))
    with pytest.raises(ConfigError, match=r"needs 1 GPU; .* asks for no GPU"):
        settle("gpu1", KNOWN, look(FakeNvml([Card()]), CUDA_VISIBLE_DEVICES=""))


def test_cards_that_somebody_computes_on_are_the_last_choice(look: Look) -> None:
    """hardware=gpu2 on a node of eight waited for cards 0 and 1, whoever was on them."""
    busy = [Card(processes=[Process(99999999, 40000)]), Card(), Card(processes=[Process(99999998, 8)]), Card()]
    machine = look(FakeNvml(busy))
    assert [gpu.taken for gpu in machine.gpus] == [True, False, False, False], "a monitor takes nothing"
    assert [gpu.index for gpu in settle("gpu2", KNOWN, machine).gpus] == [1, 2]
    assert [gpu.index for gpu in settle("gpu4", KNOWN, machine).gpus] == [0, 1, 2, 3], "the scheduler waits for it"


def test_several_profiles_are_the_widest_first_and_their_cards_are_probed_together(look: Look) -> None:
    machine = look(FakeNvml([Card() for _ in range(4)]))
    found = settle_all(["cpu", "gpu1-shared", "gpu2", "cpu"], KNOWN, machine)
    assert [profile.name for profile in found] == ["gpu2", "gpu1-shared", "cpu"]
    shared_first = together(settle_all(["gpu1-shared", "gpu1"], KNOWN, machine))
    assert shared_first and shared_first.backend == "nccl", "it is needed on one of them"
    apart = [Profile("a", "cuda", "gloo", machine.gpus[:2]), Profile("b", "cuda", "nccl", machine.gpus[1:])]
    every = together([*apart, Profile("cpu", "cpu", "gloo")])
    assert every == Profile("a", "cuda", "nccl", machine.gpus)
    assert together(settle_all(["cpu"], KNOWN, machine)) is None


@pytest.mark.parametrize("when", ["count", "name", "shutdown"])
def test_a_driver_that_fails_half_way_is_told_and_never_a_traceback(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvmlShutdown failed as well, and that was not expected."""
    nvml = FakeNvml([Card(), Card()]).install(monkeypatch)
    module = sys.modules["pynvml"]

    def gone(*_: object) -> None:
        raise module.NVMLError(999)

    monkeypatch.setattr(module, "nvmlShutdown", gone)
    if when == "count":
        monkeypatch.setattr(module, "nvmlDeviceGetCount", gone)
    if when == "name":
        monkeypatch.setattr(module, "nvmlDeviceGetName", gone)
    machine = detect({}, tmp_path)
    assert len(machine.gpus) == (2 if when == "shutdown" else 0)
    if when == "shutdown":
        assert states([nvml.cards[0].uuid])[nvml.cards[0].uuid].sick is None
    else:
        with pytest.raises(ConfigError, match="Unknown Error"):
            settle("auto", KNOWN, machine)


def test_part_of_a_list_is_used_and_the_rest_said(look: Look) -> None:
    machine = look(FakeNvml([Card() for _ in range(4)]), CUDA_VISIBLE_DEVICES="2,0,-1,1")
    assert [gpu.index for gpu in machine.gpus] == [2, 0] and not machine.meant
    assert machine.unseen and "'-1', which ends the list" in machine.unseen


def test_state_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    cards = [
        Card(processes=[Process(me.pid, 500), Process(99999999, None)], ecc_uncorrected=2, remap_pending=True),
        Card(ecc_uncorrected=None),
        Card(lost=True),
        Card(recovery=1, no_peers=True),
    ]
    FakeNvml(cards).install(monkeypatch)
    busy, plain, lost, sick = states([card.uuid for card in cards]).values()
    assert [(p.pid, p.memory_mb, p.name) for p in busy.processes] == [(me.pid, 500, me.name()), (99999999, None, None)]
    assert busy.foreign == busy.processes and busy.free_mb == 81920 - 500
    assert (busy.ecc_uncorrected, busy.remap_pending, busy.sick) == (2, True, None)
    assert (plain.ecc_uncorrected, plain.processes, plain.sick) == (None, (), None)
    assert lost.sick == "NVML: GPU is lost"
    assert sick.sick == "NVML says that it needs a GPU reset"
    assert without_peers([cards[0].uuid, cards[1].uuid, cards[3].uuid]) == [
        (cards[0].uuid, cards[3].uuid), (cards[1].uuid, cards[3].uuid),
    ]  # fmt: skip


def test_a_process_of_a_run_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    ours = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, RUN_TOKEN: "r"}
    )
    try:
        card = Card(mode="exclusive_process", processes=[Process(ours.pid)])
        FakeNvml([card]).install(monkeypatch)
        assert states([card.uuid])[card.uuid].foreign == ()
        assert len(detect({}).gpus) == 1  # held by another run of ours: its lease is waited for
    finally:
        ours.communicate()


def test_hardware_errors_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(), Card(), Card()]
    FakeNvml(cards).install(monkeypatch)
    with Nvml([card.uuid for card in cards]) as nvml:
        cards[1].xids += [31, 79, 94]  # 31 is a program's
        assert nvml.broken() == {cards[1].uuid: "Xid 94"}
        assert nvml.broken() == {cards[1].uuid: "Xid 94"}, "the planted cells' run asks first, and the run after it"
        cards[0].recovery, cards[2].remap_failed = 1, True
        assert nvml.look(cards[0].uuid).problem == "NVML says that it needs a GPU reset"
        assert "faulty rows" in str(nvml.look(cards[2].uuid).problem)
    FakeNvml(init_error=12).install(monkeypatch)
    with Nvml(["GPU-x"]) as nvml:
        assert nvml.broken() == {} and nvml.look("GPU-x").problem is None


def test_only_one_module_asks_nvml() -> None:
    found = [path for path in HARNESS.rglob("*.py") if "import pynvml" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(HARNESS)) for path in found] == ["environment/nvml.py"]


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, float("inf"), float("inf")),
        ({"memory.max": "max", "cpu.max": "max 100000"}, float("inf"), float("inf")),
        ({"job/step/memory.max": "1000", "job/memory.max": "500", "memory.max": "max"}, float("inf"), 500),
        ({"job/cpu.max": "150000 100000", "job/step/cpu.max": "400000 100000"}, 1.5, float("inf")),
        ({"job/cpu.max": "damaged"}, float("inf"), float("inf")),
        ({"other/memory.max": "7"}, float("inf"), float("inf")),
    ],
)
def test_the_tightest_limit_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], cores: float, memory: float
) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/job/step\n", encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert cgroup_limits(tmp_path / "root", own) == (cores, memory)


def test_what_a_container_holds_of_its_limit(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "root" / "job"
    own.write_text("0::/job\n", encoding="utf-8")
    assert cgroup_held(tmp_path / "root", own) == 0, "nothing is said there"
    folder.mkdir(parents=True)
    (folder / "memory.current").write_text("900\n", encoding="utf-8")
    (folder / "memory.stat").write_text("anon 300\nfile 600\nshmem 100\n", encoding="utf-8")
    assert cgroup_held(tmp_path / "root", own) == 400, "files in the page cache can be dropped, those in /dev/shm not"
    machine = detect(env={})
    assert machine.free_gb is not None and 0 < machine.free_gb <= machine.memory_gb


def test_a_machine_has_at_least_a_core_and_some_memory() -> None:
    machine = detect()
    assert machine.cores >= 1 and machine.memory_gb > 0


def test_a_profile_of_the_cpu_has_no_cards() -> None:
    for wrong in ({"gpus": 4}, {"backend": "nccl"}, {"shared": True}):
        with pytest.raises(ValueError, match="accelerator: cpu uses no GPU"):
            Hardware.model_validate({"slug": "mine", "title": "mine", "accelerator": "cpu", **wrong})
