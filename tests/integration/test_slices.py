# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors between two real processes, by every access mode and both UCX libraries."""

from __future__ import annotations

import payloads
import peers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorferry.dtypes import SUPPORTED_DTYPES

# Of ``rows``: 300 blocks of 24 rows of 1,000 floats; of ``bytes``: 24 MiB, for a block of one's own.
INDICES = [
    {"rows": slice(100, 200)},
    {"rows": (slice(None), slice(6, 12))},
    {"rows": (..., slice(250, 500))},
    {"rows": (7, slice(None, None, 5), slice(None, None, 3))},
    {"rows": (..., slice(5, 995))},
    {"rows": (-1, -1, -1), "bytes": slice(0, 0)},
    {"rows": (None, slice(1, None, 7), 3, None), "bytes": slice(1, -1, 2)},
    {"rows": ..., "bytes": slice(5 << 20, 17 << 20)},
    {"rows": slice(299, 999), "small[0].x": (slice(1, None), 0), "small[1][0]": None},
]


def large():
    return {
        "rows": payloads.tensor(torch.float32, (300, 24, 1000), 1),
        "small": [{"x": payloads.tensor(torch.bfloat16, (5, 7), 2)}, (torch.tensor(3.5), None)],
        "bytes": payloads.random_bytes(24 << 20, 3),
    }


def parts(build, slices, *args):
    """Build a payload and index some of its tensors, by their paths."""
    from tensorferry import payload

    structure, leaves = payload.flatten(build(*args))
    named = zip(payload.leaf_paths(structure), leaves.tensors, strict=True)
    cut = [tensor[slices[path]].contiguous() if path in slices else tensor for path, tensor in named]
    return payload.unflatten(structure, cut)


def pull_parts(namespace, manifest, build, slices, *args):
    """Pull parts, borrow the same parts, and return where either differs from indexing by torch."""
    expected = parts(build, slices, *args)
    pulled = namespace.consumer.pull(manifest, slices=slices, release=False)
    with namespace.consumer.borrow(manifest, slices=slices, release=False) as lent:
        borrowed = peers.difference(contiguous(lent), expected)
    return peers.difference(pulled, expected) or borrowed


def contiguous(value):
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if isinstance(value, dict):
        return {key: contiguous(one) for key, one in value.items()}
    return type(value)(map(contiguous, value)) if isinstance(value, (list, tuple)) else value


def send(mode, build, *many, args=()):
    manifest = mode.producer.call(peers.publish, "parts", build, *args)
    for slices in many:
        assert mode.consumer.call(pull_parts, manifest, build, slices, *args) == "", slices
    mode.consumer.call(release, manifest)
    assert mode.producer.call(peers.wait_released, "parts", 10)


def release(namespace, manifest):
    namespace.consumer.release(manifest)


def test_parts_equal_indexing_by_torch(mode):
    send(mode, large, *INDICES)


def test_parts_of_every_dtype(mode):
    # Shapes: (), (1,), (7,), (3, 5), (0, 4) and (2, 1, 3, 1).
    indices = {2: slice(1, None, 2), 3: (slice(1, 3), slice(1, -1)), 4: (..., 2), 5: (1, ..., None)}
    slices = {f"{dtype}[{place}]": index for dtype in SUPPORTED_DTYPES for place, index in indices.items()}
    send(mode, payloads.every_dtype, slices)


def test_uneven_ranks_make_up_the_whole(mode):
    for dim, ranks in ((0, 7), (1, 5), (2, 3), (1, 30)):
        manifest = mode.producer.call(peers.publish, "ranks", large)
        assert mode.consumer.call(pull_by_ranks, manifest, dim, ranks) == ""
        assert mode.producer.call(peers.wait_released, "ranks", 10)


def pull_by_ranks(namespace, manifest, dim, ranks):
    """Pull as tensor-parallel ranks do, the last of which may get less or nothing; compare their union."""
    whole = large()["rows"]
    each = -(-whole.shape[dim] // ranks)
    pulled = [
        namespace.consumer.pull(
            manifest,
            names=["rows"],
            slices={"rows": (slice(None),) * dim + (slice(rank * each, (rank + 1) * each),)},
            release=rank == ranks - 1,
        )["rows"]
        for rank in range(ranks)
    ]
    return peers.difference(torch.cat(pulled, dim), whole)


def test_many_reads_in_one_pull(mode):
    """A column of 20,000 rows, each read on its own: more than fit into any queue at once."""
    send(mode, tall, {"x": (slice(None), slice(64, 128))})


def tall():
    return {"x": payloads.random_bytes(20_000 * 10_000).view(20_000, 10_000)}


def entries(size):
    bound = st.none() | st.integers(-size - 1, size + 1)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, size + 1))
    return slices | st.integers(-size, size - 1) if size else slices


@st.composite
def cut_tensors(draw):
    """Descriptions of tensors, as :func:`payloads.described` takes them, and indices of some."""
    description, slices = [], {}
    for number in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        dtype = str(draw(st.sampled_from(SUPPORTED_DTYPES))).removeprefix("torch.")
        description.append((dtype, shape, "plain"))
        if draw(st.booleans()):
            index = [draw(entries(size)) for size in shape[: draw(st.integers(0, 4))]]
            slices[f"t{number}"] = tuple(index)
    return description, slices


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cut_tensors())
def test_random_parts_arrive(mode, case):
    description, slices = case
    send(mode, payloads.described, slices, args=(description,))
