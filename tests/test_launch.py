"""Real processes: they meet, agree, write one run, and what one process would have done; and what happens if one dies.

The numbers are those of one process on as many devices: loss 1e-5, gradient norm 1e-4.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import runs
import yaml

from k3jax import distributed, launch, metrics
from k3jax.config import ConfigError, MachineError

# Heads and inner widths for `tensor` 4, `fsdp` 8.
MODEL = ["model.kda.heads=4", "model.mla.heads=4", "model.mlp=32", "sample.tokens=0", "log.tensorboard=False"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("corpus"))


def arguments(workdir, corpus, *more):
    return runs.command(workdir, corpus, *MODEL, *more)[1:]


@contextlib.contextmanager
def start(processes, devices, command, *own):
    """`python -m k3jax.launch`, its output in one pipe; with all of its processes it ends with the block."""
    argv = [sys.executable, "-m", "k3jax.launch", "-n", str(processes), f"--devices={devices}", *own, *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            for _ in range(2):  # the second one ends it at once
                process.send_signal(signal.SIGTERM)


def started(process):
    """Process ids by number, of a launch."""
    found = {}
    for folder in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if folder.isdecimal() and f"PPid:\t{process.pid}\n" in Path(f"/proc/{folder}/status").read_text():
                environment = Path(f"/proc/{folder}/environ").read_text().split("\0")
                number = next(entry for entry in environment if entry.startswith("K3JAX_PROCESS="))
                found[int(number.partition("=")[2])] = int(folder)
    return found


def wait_for_step(workdir, step, process):
    while process.poll() is None:
        if (workdir / "metrics.jsonl").exists() and len(metrics.read_jsonl(workdir / "metrics.jsonl")) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0])


def assert_same_run(workdir, wanted):
    ours, theirs = runs.exact(workdir), runs.exact(wanted)
    assert ours.keys() == theirs.keys()
    for step, numbers in theirs.items():
        assert ours[step].keys() == numbers.keys()
        for name, value in numbers.items():
            tolerance = 1e-4 if name == "train/grad_norm" else 1e-5
            np.testing.assert_allclose(ours[step][name], value, rtol=tolerance, err_msg=f"{step} {name}")


def test_two_processes_one_killed_are_one(tmp_path, corpus):
    """Two of two devices each, one of them killed, all started again: one process of four devices."""
    more = ["train.steps=6", "checkpoint.every=2", "eval.every=4"]
    with start(2, 2, arguments(tmp_path / "two", corpus, *more, "mesh.fsdp=2"), "--restarts=1") as process:
        wait_for_step(tmp_path / "two", 3, process)
        while not (tmp_path / "two" / "checkpoints" / "2").is_dir():
            time.sleep(0.01)
        os.kill(started(process)[1], signal.SIGKILL)
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "launch: process 1 was ended by SIGKILL" in said and "launch: restart 1 of 1" in said
    assert "[0] resumed at step" in said and "(data 2 x fsdp 2) in 2 processes" in said
    assert "[1] step" not in said and "[Gloo]" not in said
    assert runs.run(tmp_path / "one", corpus, *MODEL, *more, devices=4) == 0
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_four_processes_and_other_meshes_behind_them(tmp_path, corpus):
    """Saved by 4 processes on fsdp 8; goes on in 1 process, and in 2 on fsdp 2 x tensor 4."""
    fields = ["optim.schedule=wsd", "optim.decay_steps=1", "optim.end_fraction=1.0"]
    fields += ["eval.every=4", "checkpoint.every=4"]
    assert runs.run(tmp_path / "one", corpus, *MODEL, *fields, "train.steps=8", devices=1) == 0
    with start(4, 2, arguments(tmp_path / "a", corpus, *fields, "train.steps=4", "mesh.fsdp=8")) as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, processes, devices, mesh in (("a", 1, 1, []), ("b", 2, 4, ["mesh.fsdp=2", "mesh.tensor=4"])):
        command = arguments(tmp_path / name, corpus, *fields, "train.steps=8", *mesh)
        with start(processes, devices, command) as process:
            said = process.communicate()[0]
        assert process.returncode == 0 and "[0] resumed at step 4" in said, said
        assert_same_run(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
def test_asked_to_stop_all_stop_at_one_step(tmp_path, corpus):
    """A signal that one process gets (an eviction) is agreed on and saved, and no success; all are asked: it is one."""
    command = arguments(tmp_path / "run", corpus, "train.steps=5000", "mesh.tensor=2")
    with start(2, 2, command, "--restarts=1") as process:
        wait_for_step(tmp_path / "run", 3, process)
        os.kill(started(process)[1], signal.SIGTERM)
        while not (tmp_path / "run" / "checkpoints").is_dir() or not any((tmp_path / "run" / "checkpoints").iterdir()):
            time.sleep(0.05)
        steps = len(metrics.read_jsonl(tmp_path / "run" / "metrics.jsonl"))
        wait_for_step(tmp_path / "run", steps + 2, process)
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[0]
    stops = re.findall(r"\[0\] stopped at step (\d+)", said)
    assert process.returncode == 0 and len(stops) == 2 and said.count("launch: restart") == 1, said
    assert "stopped, as it was asked to" in said and f"[0] resumed at step {stops[0]}" in said
    assert (tmp_path / "run" / "checkpoints" / stops[1]).is_dir()


@pytest.mark.slow
def test_without_a_launcher_the_heartbeat_ends_all(tmp_path, corpus):
    """Four processes as a cluster starts them; one is killed; the others end and say which."""
    port, seconds = free_port(), 10
    command = [sys.executable, "-m", "k3jax.train", *arguments(tmp_path / "run", corpus, "mesh.fsdp=8")]
    command.append("--config.train.steps=5000")
    environments = [
        {
            **os.environ, "K3JAX_PROCESSES": "4", "K3JAX_PROCESS": str(number), "K3JAX_DEVICES": "2",
            "K3JAX_COORDINATOR": f"localhost:{port}", "JAX_NUM_CPU_DEVICES": "2",
            "K3JAX_HEARTBEAT_SECONDS": str(seconds),
        }
        for number in range(4)
    ]  # fmt: skip
    four = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for env in environments
    ]
    try:
        wait_for_step(tmp_path / "run", 2, four[0])
        four[2].kill()
        killed = time.monotonic()
        said = [process.communicate(timeout=120)[1] for process in four]
    finally:
        for process in four:
            process.kill()
    assert time.monotonic() - killed < 2 * seconds + 15  # it is noticed within one; the rest is dying
    assert all(process.returncode for process in four)
    assert any(re.search(r"stopped sending heartbeats\):\s*2\s", text) for text in said), said


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_mistake_ends_all_with_its_code(tmp_path, corpus):
    """Found by process 0 alone, which looks at the workdir."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3}\n')
    with start(2, 1, arguments(tmp_path / "run", corpus), "--restarts=3") as process:
        said = process.communicate()[0]
    assert process.returncode == 2 and "restart" not in said
    assert said.count("config.json is missing, but a run is there") == 2
    assert "[1] error: process 0:" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-n", "0"], "--n=0 must be a number from 1 on"),
        (["-n", "two"], "--n=two must be a number from 1 on"),
        (["--devices=1"], "--n is missing"),
        (["-n", "1", "--restarts=-1"], "--restarts=-1 must be a number from 0 on"),
    ],
)
def test_flags(flags, text, capsys):
    assert launch.main(["launch", *flags, "--config=configs/k3.py:tiny"]) == 2
    assert text in capsys.readouterr().err


def meet(environment, commands):
    """Processes that only meet: what each printed. They tell the address, or the error."""
    program = (
        "import sys\nfrom k3jax import distributed\nplace = distributed.read_environment()\n"
        "try: print(distributed._meet(place))\nexcept Exception as error: print(type(error).__name__, error)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, **environment, "K3JAX_PROCESS": str(number)}, stdout=subprocess.PIPE, text=True,
        )
        for number, words in commands
    ]  # fmt: skip
    return [process.communicate()[0].strip() for process in processes]


def test_meeting():
    common = {"K3JAX_PROCESSES": "3", "K3JAX_COORDINATOR": f"127.0.0.1:{free_port()}", "K3JAX_START_SECONDS": "40"}
    addresses = meet(common, [(0, ["x"]), (1, ["x"]), (2, ["x"])])
    assert len(set(addresses)) == 1 and re.fullmatch(r"127\.0\.0\.1:\d+", addresses[0])
    other, same = meet(common, [(0, ["x"]), (1, ["y"])])
    assert other == same == "ConfigError process 1 has other command than process 0: ['y'], not ['x']"


def test_the_absent_are_named():
    place = distributed.Place(4, 0, "127.0.0.1", free_port(), None, 2, 9, 9)

    def said(number):
        with pytest.raises(MachineError) as error:
            distributed._meet(dataclasses.replace(place, process=number))
        return str(error.value)

    with ThreadPoolExecutor(2) as two:
        zero, other = two.map(said, (0, 2))
    assert zero == other
    assert re.fullmatch(r"process 1, 3 of 4 did not come to \S+ within 2 s \(K3JAX_START_SECONDS\)", zero)
    assert re.match(r"process 0 at \S+ did not answer within 2 s", said(1))


TALK = """
import sys, time
from k3jax import command, distributed
from k3jax.config import ConfigError, MachineError

def body(argv):
    distributed.join()
    one = distributed.index() == 1
    if argv[1] == "late":
        time.sleep(60 * one)
        with distributed.agreed("the table"):
            pass
    if argv[1] == "differ":
        distributed.same("the config", {"embed": distributed.index()})
    if argv[1] == "same mistake":
        time.sleep(1.5 * one)
        raise ConfigError("all found it")
    if argv[1] == "one mistake":
        with distributed.agreed("the table"):
            if one:
                raise MachineError("no room")
    if argv[1] == "crash":
        if one:
            raise KeyError("unforeseen")
        time.sleep(60)
    return int(distributed.told("a number", distributed.index() + 5))

distributed.run(lambda argv: command.guarded(body, argv), sys.argv)
"""


@pytest.mark.parametrize(
    ("what", "codes", "texts"),
    [
        ("nothing", (5, 5), ("", "")),
        ("late", (3, -9), ("process 1 did not come to the table within 4 s (K3JAX_BARRIER_SECONDS)", "")),
        ("differ", (2, 2), ("the config of process 1 is not that of process 0",) * 2),
        ("same mistake", (2, 2), ("error: all found it",) * 2),
        ("one mistake", (3, 3), ("error: process 1: no room", "error: no room")),
        ("crash", (-9, 4), ("", "KeyError: 'unforeseen'")),
    ],
)
def test_agreement(what, codes, texts):
    """Codes and last words of two processes; -9: ended by the test, as it would have waited."""
    common = {"K3JAX_PROCESSES": "2", "K3JAX_COORDINATOR": f"127.0.0.1:{free_port()}", "K3JAX_BARRIER_SECONDS": "4"}
    two = [
        subprocess.Popen(
            [sys.executable, "-c", TALK, what],
            env={**os.environ, **common, "K3JAX_PROCESS": str(number)}, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for process, code in zip(two, codes, strict=True):
            if code != -9:
                process.wait(timeout=50)
    finally:
        for process in two:
            process.kill()
    said = [process.communicate()[1] for process in two]
    for process, code, text, words in zip(two, codes, texts, said, strict=True):
        assert process.returncode == code or code == -9, words
        assert text in words and ("Traceback" in words) == (what == "crash" and code == 4), words


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"PROCESSES": "x"}, "K3JAX_PROCESSES=x must be a number from 1 on"),
        ({"PROCESSES": "2"}, "K3JAX_PROCESS= must be a number from 0 on"),
        ({"PROCESSES": "2", "PROCESS": "2"}, "K3JAX_PROCESS=2 must be below K3JAX_PROCESSES=2"),
        ({"PROCESSES": "2", "PROCESS": "0", "COORDINATOR": "here"}, "K3JAX_COORDINATOR=here must be HOST:PORT"),
        (
            {"PROCESSES": "2", "PROCESS": "0", "COORDINATOR": "a:1", "HEARTBEAT_SECONDS": "1"},
            "K3JAX_HEARTBEAT_SECONDS=1 must be a number from 2 on",
        ),
    ],
)
def test_environment(environment, text, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(f"K3JAX_{name}", value)
    with pytest.raises(ConfigError, match=re.escape(text)):
        distributed.read_environment()


def test_one_process_agrees_with_itself():
    with pytest.raises(KeyError), distributed.agreed("this"):
        raise KeyError("its own error, as it is")
    assert distributed.told("this", {"a": [1]}) == {"a": [1]} and distributed.count() == 1


def test_slurm(tmp_path):
    """launch/slurm.sh on a cluster of two that prints what each process would be."""
    each = 'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done'
    stubs = {
        "scontrol": r'printf "node7\nnode8\n"',
        "srun": f"while [[ $1 = --* ]]; do shift; done; {each}",
        "python": 'echo "$@|$K3JAX_PROCESS of $K3JAX_PROCESSES, $K3JAX_DEVICES each, $K3JAX_COORDINATOR"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "31234", "SLURM_GPUS_ON_NODE": "8"}
    script = Path(__file__).parent.parent / "launch" / "slurm.sh"
    said = subprocess.check_output(
        ["bash", script, "--config=a b"],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        text=True,
    )
    assert said.splitlines() == [f"-m k3jax.train --config=a b|{number} of 2, 8 each, node7:21234" for number in (0, 1)]


def test_jobset():
    """launch/jobset.yaml says each number once or the same."""
    found = yaml.safe_load((Path(__file__).parent.parent / "launch" / "jobset.yaml").read_text())
    name, job = found["metadata"]["name"], found["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(environment["K3JAX_PROCESSES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["K3JAX_DEVICES"])
    assert environment["K3JAX_COORDINATOR"].rpartition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == list(launch.FINAL)
    assert "K3JAX_PROCESS=$JOB_COMPLETION_INDEX" in container["command"][2]
