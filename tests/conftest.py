"""Settings that every test runs under."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests run side by side: a thread that spins keeps others from its core

import pytest
import torch
from hypothesis import settings

from fast_transformer import ops

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the Triton kernels run on CPU tensors; to be set before they are imported
    if ops.triton_missing is None:
        import triton_interpreter  # noqa: F401

# Derandomised: a property that fails here fails everywhere, and no example is remembered between two runs.
settings.register_profile("fast_transformer", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("fast_transformer")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN, so that an element nobody wrote is seen."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread():
    """For models so small that a second thread only costs, the more so beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=(ops.build_info() or {"cpu_levels": ["none built"]})["cpu_levels"])
def level(request):
    """Runs the test once with every instruction set that this CPU has."""
    with ops.cpu_level(request.param):
        yield request.param
