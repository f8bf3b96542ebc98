"""The graph engine's own functions, where tinygrad's lose what llama.cpp's keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def graph(graph_backend: Any) -> Any:
    """The module, with the device open."""
    from swactor_worker_tinygrad import graph_engine

    return graph_engine


def test_small_values_keep_their_bits_under_a_cap(graph: Any) -> None:
    x = np.geomspace(1e-7, 200, 1000).astype(np.float32)
    x[::2] *= -1
    capped = graph._cap(graph.Tensor(x), 30.0).numpy()
    np.testing.assert_allclose(capped, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6, atol=0)


def test_halves_are_rounded_as_casts_round_them(graph: Any) -> None:
    x = np.geomspace(1e-9, 6e4, 4000).astype(np.float32)
    x[::2] *= -1
    assert (graph._to_half(graph.Tensor(x)).numpy() == x.astype(np.float16)).all()
