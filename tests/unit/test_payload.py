# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import collections
import collections.abc
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry import payload
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import UsageError
from tensorferry.payload import flatten, leaf_paths, select, unflatten

T = torch.ones(2)


class Wrapper(torch.Tensor):
    """A tensor subclass that has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing may be computed on the way")


class Labelled(torch.Tensor):
    """A tensor subclass that only adds behaviour."""


class DLPackOnly:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b


def round_trip(tensors: Any) -> Any:
    structure, leaves = flatten(tensors)
    return unflatten(structure, leaves.tensors)


def only(value: Any) -> torch.Tensor:
    (tensor,) = flatten({"x": value})[1].tensors
    return tensor


def paths(tensors: Any) -> list[str]:
    return leaf_paths(flatten(tensors)[0])


def test_holes_empties_and_kinds_come_back_exactly():
    """ai-dynamo/dynamo#10071: whether it was a tensor or a list was lost, and how many there were."""
    tensors = {"a": [T, None, T, None], "b": [], "c": [None], "d": (T,), "e": {"f": T}, "g": None}
    tensors |= {
        "h": (),
        "i": {},
        "j": ((), [], {}, (None,), [()]),
        "k": torch.tensor(3.5),
        "l": torch.empty(0, 4),
    }
    assert same(round_trip(tensors), tensors)


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
nodes = st.recursive(
    st.none() | st.builds(lambda: torch.empty(0)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, nodes, max_size=4))
def test_any_structure_comes_back_with_distinct_paths(tensors):
    assert same(round_trip(tensors), tensors)
    structure, leaves = flatten(tensors)
    assert len(set(leaf_paths(structure))) == len(leaves.tensors)


def test_paths_read_like_python():
    tensors = {"outputs": [{"audio": T, "a b": T}], "layer.0.weight": T, "pooled": (None, T)}
    assert paths(tensors) == ["outputs[0].audio", 'outputs[0]["a b"]', "layer.0.weight", "pooled[1]"]


def test_names_that_would_give_one_path_are_quoted():
    assert paths({"a.b": T, "a": {"b": T}}) == ['["a.b"]', "a.b"]


def test_any_mapping_is_a_payload():
    assert same(round_trip(collections.OrderedDict(a=T)), {"a": T})


def test_a_mapping_that_makes_its_values_is_asked_once():
    made = []

    class Lazy(collections.abc.Mapping):
        def __len__(self):
            return 2

        def __iter__(self):
            return iter("ab")

        def __getitem__(self, key):
            made.append(key)
            return torch.ones(1)

    flatten(Lazy())
    assert made == ["a", "b"]


@pytest.mark.parametrize("tensors", [[T], T, None, 3])
def test_a_payload_that_is_no_mapping_is_refused(tensors):
    with pytest.raises(UsageError, match="mapping"):
        flatten(tensors)


@pytest.mark.parametrize("key", [1, None, "\ud800", ("a",)])
def test_keys_that_are_no_text_are_refused(key):
    with pytest.raises(UsageError, match="key"):
        flatten({key: T})
    with pytest.raises(UsageError, match=r"in a\[0\]"):
        flatten({"a": [{key: T}]})


Point = collections.namedtuple("Point", "x y")

REFUSED = {
    "float": 3.5,
    "str": "text",
    "object": object(),
    "set": {1},
    "numpy scalar": np.float32(1),
    "namedtuple": Point(T, T),
    "dict subclass": collections.OrderedDict(x=T),
    "object array": np.array([None]),
    "structured array": np.zeros(2, dtype=[("a", "i4")]),
    "text array": np.array(["a"]),
    "dates": np.zeros(2, dtype="M8[s]"),
    "long double": np.zeros(2, dtype=np.longdouble),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "wrapper": Wrapper(T),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_unsupported_objects_are_refused_by_path(value):
    """ai-dynamo/dynamo#9517: json.dumps(default=str) made strings of tensors."""
    with pytest.raises(UsageError, match=r"^outputs\[0\]\.audio: "):
        flatten({"outputs": [{"audio": value}]})
    with pytest.raises(UsageError, match=r"^pooled\[1\]: "):
        flatten({"pooled": (T, value)})


def test_quantized_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UsageError, match=r"^q: .*int_repr"):
        flatten({"q": quantized})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(UsageError, match=r"^n: "):
        flatten({"n": nested})


def test_a_failing_dlpack_exporter_is_refused_by_path():
    class Failing(DLPackOnly):
        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(UsageError, match=r"^x: .*not today"):
        flatten({"x": Failing(T)})


def test_cycles_and_deep_nesting_are_refused():
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UsageError, match="contains itself"):
        flatten({"a": cycle})
    deep: Any = T
    for _ in range(payload.MAX_DEPTH - 1):
        deep = [deep]
    assert same(round_trip({"a": deep}), {"a": deep})
    with pytest.raises(UsageError, match="deep"):
        flatten({"a": [deep]})


def test_shared_containers_do_not_explode():
    node: Any = [None]
    for _ in range(25):
        node = [node, node]
    with pytest.raises(UsageError, match="entries"):
        flatten({"a": node})


def test_messages_about_names_are_short_and_printable():
    structure: payload.Structure = {f"{i}\n": None for i in range(10_000)} | {"k" * 100_000: None}
    with pytest.raises(UsageError, match=r"'0\\n', .*'7\\n' and 9993 more") as caught:
        select(structure, ["x" * 1000])
    assert len(str(caught.value)) < 500
    with pytest.raises(UsageError, match="twice") as caught:
        select(structure, ["k" * 100_000] * 2)
    assert len(str(caught.value)) < 500


def test_long_keys_above_many_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(payload, "MAX_PATH_CHARACTERS", 1000)
    with pytest.raises(UsageError, match="shorter"):
        flatten({"k" * 200: [T] * 10})


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_tensors_are_taken_without_a_copy(dtype):
    tensor = torch.zeros(3, 2, dtype=torch.uint8).view(-1).repeat(16).view(dtype)
    assert only(tensor) is tensor


def test_leaves_are_plain_tensors():
    parameter = torch.nn.Parameter(torch.ones(2))
    labelled = torch.ones(2).as_subclass(Labelled)
    for tensor in (parameter, labelled, torch.ones(2, requires_grad=True)):
        taken = only(tensor)
        assert type(taken) is torch.Tensor
        assert taken.data_ptr() == tensor.data_ptr()


def test_lazy_conjugation_and_negation_are_resolved():
    """ray-project/ray#64376, meta-pytorch/torchstore#77: views of all kinds have to be copied."""
    numbers = torch.tensor([1 + 2j])
    assert not only(numbers.conj()).is_conj()
    assert only(numbers.conj()).item() == 1 - 2j
    assert not only(numbers.conj().imag).is_neg()
    assert only(numbers.conj().imag).item() == -2


def test_numpy_arrays_share_their_memory():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert only(array).data_ptr() == array.ctypes.data
    assert only(array.T).tolist() == array.T.tolist()


def test_read_only_arrays_are_taken_without_copy_or_warning():
    array = np.frombuffer(b"12345678", dtype=np.uint8)
    taken = only(array)
    assert taken.data_ptr() == array.ctypes.data
    del array
    assert bytes(taken.tolist()) == b"12345678"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4)[::-1],
        np.arange(3, dtype=">i4"),
        np.arange(3, dtype=">f8").reshape(1, 3),
        np.array(2.5),
        np.zeros((0, 3), dtype=np.uint16),
        np.zeros(3, dtype=[("a", "u1"), ("b", "<i4")])["b"],
        np.broadcast_to(np.float32(1), (3, 2)),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}-{array.strides}",
)
def test_awkward_arrays_keep_their_values(array):
    taken = only(array)
    assert list(taken.shape) == list(array.shape)
    assert taken.tolist() == array.tolist()


def test_ml_dtypes_arrays_keep_their_dtype():
    taken = only(np.array([1.5, -2], dtype=ml_dtypes.bfloat16))
    assert taken.dtype is torch.bfloat16
    assert taken.tolist() == [1.5, -2]


def test_dlpack_objects_share_their_memory():
    tensor = torch.arange(4)
    assert only(DLPackOnly(tensor)).data_ptr() == tensor.data_ptr()


def test_a_wrong_number_of_leaves_is_refused():
    structure, _ = flatten({"a": [T, None], "b": T})
    with pytest.raises(UsageError, match="fewer"):
        unflatten(structure, [T])
    with pytest.raises(UsageError, match="more"):
        unflatten(structure, [T, T, T])


def test_select_takes_names_in_the_order_given():
    structure, _ = flatten({"a": [T, None, (T,)], "b": T, "c": {"d": T}})
    assert select(structure, ["c", "a"]) == ({"c": {"d": True}, "a": [True, None, [False, True]]}, [3, 0, 1])
    with pytest.raises(UsageError, match="there are 'a', 'b', 'c'"):
        select(structure, ["x"])
    with pytest.raises(UsageError, match="twice"):
        select(structure, ["a", "a"])
