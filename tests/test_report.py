"""Pictures of a run from its event files, and one-line errors where there is nothing to draw."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from k3jax import metrics, report


def make_run(workdir, steps=60):
    rng = np.random.default_rng(0)
    writer = metrics.TensorBoardWriter(workdir / "tensorboard")
    for step in range(1, steps + 1):
        values = {
            metrics.LOSS: 5.0 / step + rng.random() if step != 30 else np.nan,
            metrics.LEARNING_RATE: 1e-2 / step,
            metrics.GRAD_NORM: rng.random(),
            metrics.MAX_VIOLATION: 100 / step**2,
            metrics.TOKENS_PER_SECOND: 4000.0,
        }
        if step % 20 == 0:
            values |= {metrics.EVAL_LOSS: 5.0 / step, metrics.ATTN_RES: rng.random((17, 3))}
        writer.write(step, values)
    writer.close()
    return workdir


def run(*args):
    return report.main(["report", *map(str, args)])


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("tiny"))


def test_curves(workdir, capsys):
    from PIL import Image

    assert run(workdir) == 0
    picture = workdir / "report" / "curves.png"
    assert capsys.readouterr().out == f"{picture}\n"
    with Image.open(picture) as image:
        assert image.size == (1560, 900)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    for colour in (report.INK, report.HELD_OUT):  # both losses are there
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert (abs(pixels - wanted).sum(axis=2) < 10).sum() > 200
    assert [path.name for path in (workdir / "report").iterdir()] == ["curves.png"]


def test_curves_are_the_numbers(workdir):
    """What the panels get is what was written: the drawn lines' data, read from the figure."""
    events = metrics.read_events(workdir / "tensorboard")
    steps, values = report._curve(events[metrics.LOSS])
    assert list(steps) == list(range(1, 61)) and np.isnan(values[29]) and np.isfinite(values).sum() == 59
    smooth = report._smooth(np.array([3.0, 0.0, 0.0, 6.0]))
    np.testing.assert_allclose(smooth, [1.5, 1.0, 2.0, 3.0])  # means of two, three, three and two neighbours
    long = report._curve({step: float(step) for step in range(1, 100_001)})
    assert len(long[0]) <= 4000 and (long[0] == long[1]).all()


def test_terminal(workdir, tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(
        b"tiny on 1 x cpu\r\n"
        b"\r  0%|          | 0/60\r 50%|#####     | 30/60\r                     \rstep 30/60  loss 1.25\n"
        b"\r 50%|#####     | 30/60\r100%|##########| 60/60\r\n\x1b[1;31mloss NaN\x1b[0m <&> done\n"
    )
    assert run(workdir, f"--log={log}", f"--out={tmp_path / 'pictures'}") == 0
    svg = (tmp_path / "pictures" / "terminal.svg").read_text()
    root = ElementTree.fromstring(svg)
    texts = [re.sub("\xa0", " ", text.text) for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text]
    joined = "".join(texts)
    for shown in ("tiny on 1 x cpu", "step 30/60  loss 1.25", "100%|##########| 60/60", "<&> done"):
        assert shown in joined
    assert " 50%|" not in joined and joined.count("tiny on") == 1
    assert (tmp_path / "pictures" / "curves.png").stat().st_size > 10_000


def test_long_logs_are_cut(workdir):
    svg = report.draw_terminal("\n".join(f"line {at}" for at in range(500)), "t")
    shown = [int(number) for number in re.findall(r"line&#160;(\d+)", svg)]
    assert shown == [*range(20), *range(461, 500)]


def test_other_runs_are_drawn_too(tmp_path):
    """Only losses, all of them NaN; a model with plain residuals."""
    writer = metrics.TensorBoardWriter(tmp_path / "tensorboard")
    for step in (1, 2):
        writer.write(step, {metrics.LOSS: float("nan")})
    writer.close()
    assert run(tmp_path) == 0


def small(tmp_path):
    make_run(tmp_path, 2)


def damaged(tmp_path):
    make_run(tmp_path, 2)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(b"\0" * 100)


def without_losses(tmp_path):
    writer = metrics.TensorBoardWriter(tmp_path / "tensorboard")
    writer.write(1, {"train/step_seconds": 1.0})
    writer.close()


@pytest.mark.parametrize(
    ("prepare", "args", "code", "text"),
    [
        (None, [], 2, "one WORKDIR is needed"),
        (None, ["{}", "{}"], 2, "one WORKDIR is needed"),
        (None, ["{}/none"], 2, "none is no folder"),
        (None, ["{}"], 2, "holds no TensorBoard event file"),
        (damaged, ["{}"], 2, "is damaged at byte 0"),
        (without_losses, ["{}"], 2, "hold no train/loss"),
        (small, ["{}", "--nonsense=1"], 2, "nonsense"),
        (small, ["{}", "--log={}/no.txt"], 2, "no.txt cannot be read: No such file"),
        (small, ["{}", "--out=/dev/null/x"], 3, "Not a directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, prepare, args, code, text):
    if prepare:
        prepare(tmp_path)
    assert run(*(arg.format(tmp_path) for arg in args)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and text in err and len(err.splitlines()) == 1


def test_help(capsys):
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "WORKDIR" in shown and "--log" in shown and "--out" in shown
