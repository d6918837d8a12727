"""The workdir: the same run goes on, anything else is refused in one line; one process at a time."""

import copy
import json
import os
import signal
import subprocess
import sys

import pytest

from k3jax.config import ConfigError, MachineError
from k3jax.workdir import RESUMABLE, Workdir, differences

CONFIG = {
    "name": "tiny",
    "init_from": None,
    "model": {"layers": 8, "mla_layers": (4, 8), "moe": {"top_k": 4}},
    "data": {"source": ("stdlib",), "seed": 0},
    "optim": {"learning_rate": 0.01, "clip_norm": None},
    "train": {"steps": 100, "epochs": None, "accumulate": 1, "max_skipped": 20, "seed": 0},
    "eval": {"every": 10},
    "checkpoint": {"every": 5, "keep": 2},
    "mesh": {"data": None, "fsdp": 1},
    "memory": {"policy": "save_all"},
}


def changed(**values):
    """The config with other values: `train__steps=5`."""
    config = copy.deepcopy(CONFIG)
    for name, value in values.items():
        *groups, last = name.split("__")
        place = config
        for group in groups:
            place = place[group]
        place[last] = value
    return config


def begun(folder, *, steps=(), logged=0, data=None, config=CONFIG):
    """A workdir as a run leaves it."""
    with Workdir(folder, config) as workdir:
        if data is not None:
            workdir.check_data(data)
        workdir.begin()
    (folder / "checkpoints").mkdir()
    for step in steps:
        (folder / "checkpoints" / str(step)).mkdir()
    if logged:
        lines = [json.dumps({"step": step, "train/loss": 2.0}) for step in range(1, logged + 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def refused(folder, config=CONFIG, kind=ConfigError):
    with pytest.raises(kind) as caught:
        Workdir(folder, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def test_new_and_resumed(tmp_path):
    """Nothing is written before the run begins; what is written is read back."""
    folder = tmp_path / "deep" / "run"
    with Workdir(folder, CONFIG) as workdir:
        workdir.check_data({"stdlib": "abc"})
        assert {path.name for path in folder.iterdir()} == {".lock"}
        workdir.begin()
    assert json.loads((folder / "config.json").read_text())["model"]["mla_layers"] == [4, 8]
    assert json.loads((folder / "data.json").read_text()) == {"stdlib": "abc"}
    with Workdir(folder, CONFIG) as workdir:
        workdir.check_data({"stdlib": "abc"})
        workdir.begin()
    assert {path.name for path in folder.iterdir()} == {".lock", "config.json", "data.json"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optim__learning_rate": 0.5}, "optim.learning_rate: 0.01 -> 0.5"),
        ({"model__mla_layers": (8,)}, "model.mla_layers: [4, 8] -> [8]"),
        ({"model__moe__top_k": 2, "train__seed": 1}, "model.moe.top_k: 4 -> 2; train.seed: 0 -> 1"),
        ({"optim__clip_norm": 0.0}, "optim.clip_norm: None -> 0.0"),
        ({"data__seed": 5}, "data.seed: 0 -> 5"),
        ({"train__new_field": 3}, "train.new_field: None -> 3"),
    ],
)
def test_another_config_is_refused(tmp_path, change, named):
    folder = begun(tmp_path / "run", steps=(5,))
    before = contents(folder)
    assert f"config.json is of another run: {named};" in refused(folder, changed(**change))
    assert contents(folder) == before


def test_many_differences_stay_one_short_line(tmp_path):
    config = changed(model={f"field{i}": i for i in range(30)})
    assert "; and 25 more; give another --workdir" in refused(begun(tmp_path / "run", logged=1), config)


def test_resumable_fields(tmp_path):
    """Every one of them may change, groups that an older version did not have as well; config.json then says so."""
    values = {"name": "other", "train": {**CONFIG["train"], "steps": 7, "epochs": 2, "accumulate": 4, "max_skipped": 1}}
    values |= {"init_from": "runs/other", "data": {**CONFIG["data"], "source": ("moved/a.txt",), "tokenizer": "b.json"}}
    values |= {group.rstrip("."): {"anything": 1} for group in RESUMABLE if group.endswith(".")}
    folder = begun(tmp_path / "run", steps=(5,))
    with Workdir(folder, {**CONFIG, **values}) as workdir:
        workdir.begin()
    assert json.loads((folder / "config.json").read_text())["train"]["accumulate"] == 4


@pytest.mark.parametrize("near", ["namespace", "train__steps_more", "evaluation"])
def test_names_near_resumable_ones(tmp_path, near):
    assert f"{near.replace('__', '.')}: None -> 1" in refused(begun(tmp_path / "run", logged=1), changed(**{near: 1}))


def test_nothing_trained_yet_binds_nothing(tmp_path):
    """A run that ended before its first step, out of memory perhaps, may be mended in the same folder."""
    folder = begun(tmp_path / "run", data={"a": "1"})
    with Workdir(folder, changed(optim__learning_rate=0.5)) as workdir:
        workdir.check_data({"b": "2"})
        workdir.begin()
    assert json.loads((folder / "data.json").read_text()) == {"b": "2"}


@pytest.mark.parametrize("folder", ["gs://bucket/run", "s3://bucket/run"])
def test_remote_folder_is_refused(folder):
    assert "local path" in refused(folder)


def test_differences():
    old = {"a": 1, "b": {"c": [1], "d": None}, "e": {"f": 1}}
    assert differences(old, {"a": 1, "b": {"c": [1, 2]}, "e": 3}) == [("b.c", [1], [1, 2]), ("e", {"f": 1}, 3)]
    assert differences({"a": None}, {"a": {"b": 0, "c": None}, "d": None}) == [("a.b", None, 0)]


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\x00", b"\xff\xfe{}", b"3", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_damaged_files(tmp_path, name, text):
    folder = begun(tmp_path / "run", steps=(5,), data={"stdlib": "abc"})
    (folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=name), Workdir(folder, CONFIG) as workdir:
        workdir.check_data({"stdlib": "abc"})


def test_changed_data_are_refused_by_name(tmp_path):
    folder = begun(tmp_path / "run", steps=(5,), data={"stdlib": "abc", "b.txt": "1", "c.txt": "2"})
    before = contents(folder)
    with Workdir(folder, CONFIG) as workdir:
        told = "data are not those of the run in .*: d.txt is new; c.txt is gone; b.txt has changed; to start anew"
        with pytest.raises(ConfigError, match=told):
            workdir.check_data({"stdlib": "abc", "b.txt": "9", "d.txt": "3"})
    assert contents(folder) == before
    (folder / "data.json").unlink()
    with Workdir(folder, CONFIG) as workdir, pytest.raises(ConfigError, match=r"data\.json is missing"):
        workdir.check_data({"stdlib": "abc"})


@pytest.mark.parametrize(
    ("steps", "logged", "folder_there", "fine"),
    [
        ((5,), 7, True, True),
        ((), 0, True, True),
        ((), 4, True, True),  # killed before its first checkpoint
        ((), 10, True, True),  # killed inside its first save, or after one that failed
        ((), 11, True, False),  # the checkpoints were there once
        ((), 3, False, False),  # the run had made this folder before its first step
        ((), 0, False, True),
    ],
)
def test_lost_checkpoints(tmp_path, steps, logged, folder_there, fine):
    """A log without the checkpoints that belong to it is not written over."""
    folder = begun(tmp_path / "run", steps=steps, logged=logged)
    if not folder_there:
        (folder / "checkpoints").rmdir()
    if fine:
        return Workdir(folder, CONFIG).close()
    told = refused(folder, changed(checkpoint={"every": 1000, "keep": 1}))
    assert f"has no checkpoint, but metrics.jsonl has {logged} steps; to start anew" in told


def test_cut_log(tmp_path):
    folder = begun(tmp_path / "run", logged=30)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "tra')
    assert "metrics.jsonl has 30 steps" in refused(folder)
    (folder / "metrics.jsonl").write_bytes(b"\x00" * 50)
    Workdir(folder, CONFIG).close()


def test_lost_config(tmp_path):
    folder = begun(tmp_path / "run", steps=(5,))
    (folder / "config.json").unlink()
    assert "config.json is missing, but a run is there" in refused(folder)


def test_one_process_at_a_time(tmp_path):
    """The second process is told who is there. A killed one holds nothing."""
    code = (
        "import sys, time, json\nfrom k3jax.workdir import Workdir\n"
        "workdir = Workdir(sys.argv[1], json.loads(sys.argv[2]))\nprint('locked', flush=True)\ntime.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), json.dumps(CONFIG)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "locked\n"
            assert f"--workdir={tmp_path} is in use: process {first.pid} on " in refused(tmp_path)
        finally:
            first.send_signal(signal.SIGKILL)
    with Workdir(tmp_path, CONFIG):
        assert f"is in use: process {os.getpid()} on " in refused(tmp_path)
    Workdir(tmp_path, CONFIG).close()
    assert (tmp_path / ".lock").read_text().count("\n") == 1


def test_a_refusal_holds_no_lock(tmp_path):
    begun(tmp_path / "run", steps=(5,))
    refused(tmp_path / "run", changed(train__seed=3))
    Workdir(tmp_path / "run", CONFIG).close()


def test_no_folder_can_be_there(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"):
        assert "--workdir=" in refused(path)


def test_unwritable(tmp_path):
    """As a user who may not write there; root may everywhere, so it steps back for this."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o500)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        told = refused(folder, kind=MachineError)
        assert told.startswith(f"--workdir={folder} cannot be written: permission denied")
    finally:
        if root:
            os.seteuid(0)
