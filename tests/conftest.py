"""Strict numerics for every test: several CPU devices, no silent rank promotion, our own warnings are errors."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One cache for all test processes: a second run of the suite compiles nothing.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "k3jax_tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Programs here are small and run a few times: compiling them is the cost.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "model"), str(HERE / "pallas_kernels")]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file():
    """Compiled programs live in memory maps, of which Linux gives a process 65,530; the whole suite would need more."""
    yield
    jax.clear_caches()


def pytest_terminal_summary(terminalreporter, config):
    """Says how many golden files ran. A whole default run that left one out has failed."""
    import golden_files
    from test_golden import ASSERTED_BY

    ran = golden_files.USED & set(ASSERTED_BY)
    terminalreporter.write_line(f"golden files asserted: {len(ran)} of {len(ASSERTED_BY)}")


def pytest_sessionfinish(session, exitstatus):
    import golden_files
    from test_golden import ASSERTED_BY

    whole = not session.config.args or session.config.args == session.config.getini("testpaths")
    whole = whole and not session.config.option.keyword and session.config.option.markexpr == "not slow"
    if exitstatus == 0 and whole and golden_files.FOLDER.exists() and set(ASSERTED_BY) - golden_files.USED:
        session.exitstatus = 1
