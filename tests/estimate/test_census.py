"""The collectives of the whole train step: against what is written down in tests/census, and against the formula.

The default tests compile the smallest model that divides over eight devices (sizes.APART: sizes.MESH takes three times
as long); sizes.MESH on 8 and 64 devices, and proxy_1b on 512, are slow tests.
"""

import dataclasses
import json

import pytest
from census import cases

from k3jax import config as configs
from k3jax.config import MachineError
from k3jax.estimate import __main__ as command_line
from k3jax.estimate import aot, census, collectives, formula, hlo


def load(case):
    return configs.load(case.spec, case.flags)


def check(name, found):
    """found: `Census.to_dict()`, as JSON gives it back."""
    file = cases.file_of(name)
    assert file.exists(), f"{file.name} is not there. To write it:  {cases.WRITE} {name}"
    written = json.loads(file.read_text())
    assert found["program"] == written["program"], f"other collectives than {file.name}; if meant: {cases.WRITE} {name}"
    assert found["sent"] == written["sent"]
    assert abs(found["wanted"] - found["sent"]) <= 0.1 * found["sent"]
    # That is the promise. In truth every kind over every set of axes agrees, most of them to the byte: the compiler may
    # give a gather and that of the backward pass two layouts, and then does both.
    sums = {}
    for kind, axes, _, sent in found["program"]:
        sums[kind, axes] = sums.get((kind, axes), 0) + sent
    for _, kind, axes, _, sent in found["formula"]:
        sums[kind, axes] = sums.get((kind, axes), 0) - sent
    off = {key: gap for key, gap in sums.items() if abs(gap) > 1e-3 * found["sent"]}
    assert not off, f"program less formula, in bytes: {off}"


@pytest.mark.parametrize("name", cases.QUICK)
def test_eight_devices(name):
    found = census(load(cases.QUICK[name]))
    assert hlo.UNNAMED not in {line.axes for line in found.lines}
    check(name, json.loads(json.dumps(found.to_dict())))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", cases.SLOW)
def test_many_devices(name, tmp_path):
    """By the command line, which gives its process as many CPU devices as the mesh has."""
    check(name, cases.census_of(cases.SLOW[name], tmp_path / "census.json"))


def test_formula_by_hand():
    """A few terms of the quick case, from its sizes: 4 devices hold 2 of 8 rows each, of 128 tokens, embed is 48."""
    config = load(cases.QUICK["apart_fsdp2_expert2_tensor2"])
    found = {(term.name, term.axes): term for term in formula.terms(config)}
    tokens, embed = 2 * 128, 48
    one = found["tensor: embedding", "tensor"]
    assert (one.kind, one.count, one.sent) == ("all-reduce", 1, 2 * tokens * embed * 4 / 2)
    # Six layers of which five have experts; three of eight experts each, four of them at home on either side.
    one = found["expert: rows forth", "expert"]
    assert (one.kind, one.count, one.sent) == ("all-to-all", 5, 5 * 2 * tokens * 3 * 18 * 4 / 2)
    one = found["router: histogram", "fsdp+expert"]
    assert (one.count, one.sent) == (1, 2 * 5 * 8 * 1000 * 4 * 3 / 4)
    # Repeated over all that hold different tokens: every vector.
    assert ("gradients of repeated parameters", "fsdp+expert") in found
    assert found["gradients of repeated parameters", "expert"].kind == "all-reduce"  # f_b has no axis for expert


def test_formula_follows_the_mesh():
    """Nothing is sent on one device; twice the micro-batches gather parameters twice, and sum activations as before."""
    config = load(cases.QUICK["apart_fsdp2_expert2_tensor2"])
    assert not formula.terms(dataclasses.replace(config, mesh=configs.MeshConfig(1)))
    twice = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2))
    once, twice = ({(t.name, t.axes): t.sent for t in formula.terms(c)} for c in (config, twice))
    gathered = "parameters gathered, forward", "fsdp+expert"
    assert twice[gathered] == 2 * once[gathered]
    assert twice["tensor: MLP", "tensor"] == once["tensor: MLP", "tensor"]
    assert twice["router: histogram", "fsdp+expert"] == once["router: histogram", "fsdp+expert"]


def test_tables():
    config = load(cases.QUICK["apart_fsdp2_expert2_tensor2"])
    terms = tuple(formula.terms(config))
    mesh = collectives.abstract_mesh(config.mesh)
    found = collectives.Census(collectives.lines([], terms, mesh), terms, 0.0)
    for table in collectives.format_tables(found):
        assert table.row_count > 10
    assert found.sent == 0 and found.wanted == sum(term.sent for term in terms)


def test_command_line(capsys, tmp_path):
    """A census of one device is quick, and empty; more devices than JAX has started with are one line."""
    run = lambda *flags: command_line.main(["estimate", f"--config={cases.MODELS}:small", *flags])  # noqa: E731
    mistakes = {
        ("--show=collectives", "--config.mesh.data=512", "--config.data.batch_rows=512"): (3, "512 CPU devices are"),
        ("--show=collectives", "--picture=x.png"): (2, "--picture goes with --show=sharding"),
        (f"--json={tmp_path}/x.json",): (2, "--json goes with --show=collectives"),
        ("--show=collectives", "--json=x.txt"): (2, "must be a .json"),
    }
    for flags, (code, message) in mistakes.items():
        assert run(*flags) == code
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_absent_devices():
    assert len(aot.cpu_devices(8)) == 8
    with pytest.raises(MachineError, match="1000 CPU devices are needed"):
        aot.cpu_devices(1000)
    with pytest.raises(MachineError, match="CUDA"):
        aot.cuda_devices(1, 8, "no such GPU")
