"""Reads the golden vectors in tests/golden (their layout and conventions are in its manifest.json)."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
USED: set[str] = set()


def manifest() -> dict:
    """The manifest: file name -> oracle, conventions, array shapes."""
    return json.loads((FOLDER / "manifest.json").read_text())


def golden(name: str) -> dict[str, np.ndarray]:
    """All arrays of one file; the file counts as run."""
    USED.add(name)
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def assert_close(actual, expected, tolerance: float, name: str = "") -> None:
    """Asserts max|actual - expected| <= tolerance * max|expected|, with the figure in the message."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    if not expected.size:
        return
    assert np.isfinite(actual).all(), f"{name}: not finite"
    error, scale = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= tolerance * scale, f"{name}: max|diff| {error:.3g} > {tolerance:g} * {scale:.3g}"
