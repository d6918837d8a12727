"""Checkpoints: what comes back is what was there, whatever happens while it is written (O08, O17)."""

import contextlib
import dataclasses
import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from k3jax import checkpoint
from k3jax.checkpoint import Checkpoints, complete_steps, read_parameters, require_space, state_bytes
from k3jax.config import ConfigError, MachineError
from k3jax.step import TrainState


def state():
    """A small state with an int beyond float32, the bias of O08, whose bits bf16 cannot hold, and a PRNG key's data."""
    return TrainState(
        step=jnp.int32(16_777_217),
        params={
            "blocks.0.head.0.attention.a_log": jnp.float32([1.00390625, -0.0, jnp.nan]),
            "embed": jnp.ones((3, 2), jnp.bfloat16),
        },
        opt_state={
            "muon": {"momentum": {"embed": jnp.arange(6.0).reshape(3, 2)}},
            "adamw": (jnp.int32(3), jnp.ones(2)),
        },
        router_bias=jnp.float32([[7.00, 7.01, 7.02, 7.03]]),
        bias_ema=jnp.zeros((1, 4)),
        counters={"skipped_steps": jnp.int32(2), "key": jax.random.key_data(jax.random.key(5))},
    )


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(before, after):
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@contextlib.contextmanager
def files_of_at_most(count):
    """The system refuses to write more bytes than that into a file: a failure that is no mock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ended(checkpoints):
    """Waits until the save in the background has come to its end, without asking how."""
    if checkpoints._pending is not None:
        checkpoints._pending[1].exception()


# ---- round trips --------------------------------------------------------------------------------------------------
def test_round_trip_and_retention(tmp_path):
    before = state()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (3, 5, 9, 10):
        checkpoints.save(step, before)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert again.steps() == [9, 10] and again.latest() == 10
    assert sorted(path.name for path in again.folder.iterdir()) == ["10", "9"]
    assert_same(before, again.restore(10, shapes(before)))


def test_counts_complete_steps_only(tmp_path):
    """Names that are no step, files, and what killed saves left do not count; the last go when training begins."""
    for name in ("7", "12.orbax-checkpoint-tmp/d", "3.orbax-checkpoint-tmp-old", "best_99", "007", "-1", "²"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "50").write_text("a file")
    assert complete_steps(tmp_path / "checkpoints") == [7]
    assert Checkpoints(tmp_path, keep=1).latest() == 7
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"7", "best_99", "007", "-1", "50", "²"}
    assert complete_steps(tmp_path / "none") == []


def test_a_step_left_by_another_run_is_replaced(tmp_path):
    first = Checkpoints(tmp_path, keep=2)
    first.save(4, {"x": jnp.float32(1)}, wait=True)
    second = Checkpoints(tmp_path, keep=2)
    second.save(4, {"x": jnp.float32(2)})
    second.save(4, {"x": jnp.float32(3)}, wait=True)  # a signal comes in the step of a save: the state is the same one
    assert second.restore(4, {"x": jnp.float32(0)})["x"] == 2 and second.steps() == [4]


def test_donated_buffers_do_not_reach_the_disk(tmp_path):
    """The next steps take the state's buffers while the save is being written: the file holds the state of the save.

    On CPU what is written are those buffers themselves (overwriting them by address here damages the file), and
    JAX does not let a donation have them as long as they are read.
    """
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * -3 + 1, tree), donate_argnums=0)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    host = {f"params/{i}": rng.normal(size=(512, 513)).astype(np.float32) for i in range(8)}
    for place in (NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[3])):

        def placed(place=place):
            return {name: jax.device_put(array.copy(), place) for name, array in host.items()}

        jax.block_until_ready(step(placed()))  # compiled: from now on nothing gives the writer time
        checkpoints = Checkpoints(tmp_path, keep=1)
        on_device = placed()
        checkpoints.save(1, on_device)
        for _ in range(3):
            on_device = step(on_device)
        jax.block_until_ready(on_device)
        assert not checkpoints.check()
        checkpoints.wait()
        assert_same(host, checkpoints.restore(1, on_device))


@pytest.mark.parametrize("saved_on", ["fsdp=8", "data=8"])
def test_placed_anew(tmp_path, saved_on):
    """Saved on one mesh, restored on others and on one device, with and without a mesh set around it (field.md 44)."""
    devices = {"fsdp=8": (1, 8), "data=8": (8, 1), "data=4,fsdp=2": (4, 2)}
    meshes = {n: jax.make_mesh(s, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2) for n, s in devices.items()}
    rng = np.random.default_rng(1)
    host = {"w": rng.normal(size=(5, 16, 3)).astype(np.float32), "b": rng.normal(size=(7,)).astype(jnp.bfloat16)}
    host["step"] = np.int32(3)
    specs = {"w": P(None, "fsdp"), "b": P(), "step": P()}
    checkpoints = Checkpoints(tmp_path, keep=9)
    for around in (None, *meshes.values()):
        with jax.set_mesh(around) if around is not None else contextlib.nullcontext():
            mesh = meshes[saved_on]
            tree = {name: jax.device_put(host[name], NamedSharding(mesh, specs[name])) for name in host}
            checkpoints.save(2, tree, wait=True)
            for target in meshes.values():
                placing = {name: NamedSharding(target, spec) for name, spec in specs.items()}
                like = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placing[n]) for n, a in host.items()}
                found = checkpoints.restore(2, like)
                assert_same(host, found)
                assert all(found[name].sharding == placing[name] for name in host)
            found = checkpoints.restore(2, shapes(host))
            assert_same(host, found)
            assert found["w"].sharding == SingleDeviceSharding(jax.devices()[0])
        checkpoints._written = None  # as if it were another run's


# ---- refusals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": jnp.float32(0)}, r"step is int32\[\], not float32"),
        ({"router_bias": jnp.zeros((1, 4), jnp.bfloat16)}, r"router_bias is float32\[1, 4\], not bfloat16"),
        ({"router_bias": jnp.zeros((2, 4))}, r"router_bias is float32\[1, 4\], not float32\[2, 4\]"),
        ({"counters": {}}, "skipped_steps is not known"),
        ({"counters": {"more": jnp.int32(0)}}, "more is missing; counters/skipped_steps is not known"),
    ],
)
def test_misfit_is_refused(tmp_path, change, named):
    checkpoints = Checkpoints(tmp_path, keep=1)
    before = dataclasses.replace(state(), counters={"skipped_steps": jnp.int32(2)})
    checkpoints.save(1, before, wait=True)
    with pytest.raises(ConfigError, match=named):
        checkpoints.restore(1, shapes(dataclasses.replace(before, **change)))


def test_damage_is_refused(tmp_path, capfd):
    """Each file of a checkpoint missing, cut, empty or with a bit turned: the same state, or one line, no traceback."""
    before = state()
    whole = Checkpoints(tmp_path / "whole", keep=2)
    whole.save(3, before)
    whole.save(6, before, wait=True)
    refused = set()
    files = sorted(path for path in (whole.folder / "6").rglob("*") if path.is_file())
    assert len(files) > 5
    rng = np.random.default_rng(0)
    copy = Checkpoints(tmp_path / "copy", keep=2)
    (copy.folder / "3").mkdir()
    for file in files:
        for harm in ("missing", "cut", "empty", "turned"):
            shutil.copytree(whole.folder / "6", copy.folder / "6", dirs_exist_ok=True)
            target = copy.folder / "6" / file.relative_to(whole.folder / "6")
            content = bytearray(target.read_bytes())
            if harm == "missing":
                target.unlink()
            elif harm == "turned":
                content[int(rng.integers(len(content)))] ^= 16
                target.write_bytes(content)
            else:
                target.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
            try:
                assert_same(before, copy.restore(6, shapes(before)))
            except ConfigError as error:
                refused.add((file.name, harm))
                assert f"{copy.folder / '6'} " in str(error) and "\n" not in str(error) and len(str(error)) < 700
                if "is damaged" in str(error):
                    assert str(error).endswith(f"to go on from step 3, delete {copy.folder / '6'}")
                else:  # a turned bit of a name in the description
                    assert harm == "turned" and "does not fit" in str(error)
    assert {(name, harm) for name, harm in refused if name == "manifest.ocdbt"} >= {("manifest.ocdbt", "missing")}
    assert len(refused) >= 10
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"checkpoints/3 is damaged: [^;]*$"):  # nothing older to go on from
        copy.restore(3, shapes(before))


# ---- failures -----------------------------------------------------------------------------------------------------
def test_failed_save_is_reported_and_tried_again(tmp_path, capfd):
    """The state of the day replaces the one that was not written; what failed leaves nothing behind."""
    told = []
    checkpoints = Checkpoints(tmp_path, keep=1, pauses=(0.2, 0.2), report=told.append)
    checkpoints.save(1, {"x": jnp.full((300, 300), 1.5)}, wait=True)
    with files_of_at_most(5000):
        checkpoints.save(2, {"x": jax.random.normal(jax.random.key(0), (300, 300))})
        ended(checkpoints)
    assert not checkpoints.check()  # not yet
    assert checkpoints.steps() == [1] and [path.name for path in checkpoints.folder.iterdir()] == ["1"]
    checkpoints.save(3, {"x": jnp.zeros((300, 300))})  # it is too early for that as well
    assert checkpoints._pending is None and checkpoints.steps() == [1]
    time.sleep(0.2)
    assert checkpoints.check()
    checkpoints.save(4, {"x": jnp.full((300, 300), 2.5)})
    checkpoints.wait()
    assert not checkpoints.check() and checkpoints.steps() == [4]
    assert len(told) == 1 and "checkpoints/2 could not be written: " in told[0] and "attempt 1 of 3" in told[0]
    assert os.strerror(errno.EFBIG).lower() in told[0]
    assert (checkpoints.restore(4, {"x": jnp.zeros((300, 300))})["x"] == 2.5).all()
    checkpoints.close()
    assert "Traceback" not in capfd.readouterr().err


def test_last_attempt_ends_in_one_line(tmp_path):
    told = []
    checkpoints = Checkpoints(tmp_path, keep=1, pauses=(0.01, 0.02), report=told.append)
    checkpoints.save(1, {"x": jnp.float32(1.5)}, wait=True)
    with files_of_at_most(20), pytest.raises(MachineError) as caught:
        checkpoints.save(2, {"x": jnp.ones(1000)}, wait=True)
    error = str(caught.value)
    assert f"{checkpoints.folder / '2'} could not be written: file too large; 3 attempts" in error
    assert "the last complete checkpoint is of step 1" in error and "\n" not in error and len(told) == 2
    checkpoints.close()  # silent: it has been said
    assert checkpoints.restore(1, {"x": jnp.float32(0)})["x"] == 1.5


def test_last_attempt_of_the_loop_raises_from_check(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, pauses=(0.0,), report=logging.debug)
    with files_of_at_most(20):
        checkpoints.save(1, {"x": jnp.ones(1000)})
        ended(checkpoints)
        assert checkpoints.check()
        checkpoints.save(2, {"x": jnp.ones(1000)})
        ended(checkpoints)
        with pytest.raises(MachineError, match=r"checkpoints/2 could not be written.*2 attempts; no checkpoint is"):
            checkpoints.check()


def test_close_tells_of_a_save_that_was_not_tried_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, pauses=(60.0,), report=logging.debug)
    with files_of_at_most(20):
        checkpoints.save(1, {"x": jnp.ones(1000)})
        with pytest.raises(MachineError, match="the last save failed and was not tried again"):
            checkpoints.close()


def test_full_disk(tmp_path):
    """A file system of one MiB, in a process of its own: the cause is named, and the space is given back."""
    code = (
        "import sys, jax, jax.numpy as jnp\n"
        "from k3jax.checkpoint import Checkpoints, MachineError\n"
        "checkpoints = Checkpoints(sys.argv[1], 1, pauses=(0.0, 0.0), report=print)\n"
        "small, large = (jax.random.normal(jax.random.key(0), (n,)) for n in (1000, 900_000))\n"
        "checkpoints.save(1, {'x': small}, wait=True)\n"
        "try:\n    checkpoints.save(2, {'x': large}, wait=True)\n"
        "except MachineError as error:\n    print(error)\n"
        "checkpoints.save(3, {'x': small}, wait=True)\nprint(checkpoints.steps())\n"
    )
    (tmp_path / "disk").mkdir()
    mount = f'mount -t tmpfs -o size=1m none {tmp_path / "disk"} && exec "$@"'
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    try:
        usable = subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        usable = False
    if not usable:
        pytest.skip("this system lets no user mount a small file system")
    arguments = [*isolated, sys.executable, "-c", code, str(tmp_path / "disk")]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and found.stderr == ""
    lines = found.stdout.splitlines()
    assert len(lines) == 4 and lines[-1] == "[3]"
    assert all("checkpoints/2 could not be written: no space left on device" in line for line in lines[:3])


def test_unwritable_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    with pytest.raises(MachineError, match="checkpoints cannot be written: file exists"):
        Checkpoints(tmp_path, keep=1)


def test_space(tmp_path, monkeypatch):
    require_space(tmp_path / "not" / "there", 1000)
    with pytest.raises(MachineError, match=r"runs/x: checkpoints need 9.09e\+08 GiB, .* GiB are free"):
        require_space("runs/x", int(1e18 * 0.976))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 3 * 2**29))
    require_space(tmp_path, 3 * 2**29)
    with pytest.raises(MachineError, match=r"need 2 GiB, 1.5 GiB are free"):
        require_space(tmp_path, 2**31)
    assert state_bytes({"a": jnp.ones((3, 5), jnp.bfloat16), "b": jnp.int32(1)}) == 34


# ---- parameters for fine-tuning -----------------------------------------------------------------------------------
def test_read_parameters(tmp_path):
    before = state()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, before)
    checkpoints.save(12, dataclasses.replace(before, params=jax.tree.map(lambda x: x + 1, before.params)), wait=True)
    like = shapes({"params": before.params, "router_bias": before.router_bias})
    listing = sorted(path for path in tmp_path.rglob("*"))
    assert_same(
        {"params": before.params, "router_bias": before.router_bias},
        read_parameters(tmp_path / "checkpoints" / "3", like),
    )
    assert read_parameters(tmp_path, like)["params"]["embed"][0, 0] == 2  # the last one
    assert listing == sorted(path for path in tmp_path.rglob("*"))
    like["params"]["lm_head"] = like["params"].pop("embed")
    with pytest.raises(ConfigError, match=r"params/embed is not known; params/lm_head is missing"):
        read_parameters(tmp_path, like)


@pytest.mark.parametrize("path", ["", "none", "checkpoints", "checkpoints/7", "empty"])
def test_read_parameters_from_what_is_none(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(ConfigError, match=str(tmp_path / path)):
        read_parameters(tmp_path / path, {"params": {"x": jax.ShapeDtypeStruct((), jnp.float32)}})
