# SPDX-License-Identifier: Apache-2.0
"""UCX called by hand, for what the native unit never does: writing to a peer's memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

from tensorferry.backends.ucx_native import load_library

_FEATURES, _RMA = 1, 2  # bits of ucp_params.field_mask and of features
_ADDRESS = 1  # bit of ucp_ep_params.field_mask
_IN_PROGRESS = 1


class _Zeroed(ctypes.Structure):
    """The first fields of ucp_params and ucp_ep_params; the rest is not looked at."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * 1024),
    ]


def write(options: Mapping[str, str], address: bytes, key: bytes, target: int, data: bytes) -> int:
    """Write ``data`` to ``target`` in the memory of the worker at ``address``; return UCX's status."""
    ucx = ctypes.CDLL(load_library().path)
    for name in ("ucp_put_nbx", "ucp_ep_flush_nbx"):
        getattr(ucx, name).restype = ctypes.c_void_p

    def check(status: int, what: str) -> None:
        assert status == 0, f"{what}: status {status}"

    config, context, worker, endpoint, unpacked = (ctypes.c_void_p() for _ in range(5))
    check(ucx.ucp_config_read(None, None, ctypes.byref(config)), "config")
    for name, value in options.items():
        check(ucx.ucp_config_modify(config, name.encode(), value.encode()), name)
    parameters = _Zeroed(_FEATURES, _RMA)
    check(ucx.ucp_init_version(1, 12, ctypes.byref(parameters), config, ctypes.byref(context)), "context")
    parameters = _Zeroed()
    check(ucx.ucp_worker_create(context, ctypes.byref(parameters), ctypes.byref(worker)), "worker")
    there = ctypes.create_string_buffer(address, len(address))
    parameters = _Zeroed(_ADDRESS, ctypes.addressof(there))
    check(ucx.ucp_ep_create(worker, ctypes.byref(parameters), ctypes.byref(endpoint)), "endpoint")
    check(ucx.ucp_ep_rkey_unpack(endpoint, key, ctypes.byref(unpacked)), "key")

    def finish(request: int | None) -> int:
        value = ctypes.c_int64(request or 0).value
        if -256 < value <= 0:
            return value
        end = time.monotonic() + 30
        while (status := ucx.ucp_request_check_status(ctypes.c_void_p(value))) == _IN_PROGRESS:
            ucx.ucp_worker_progress(worker)
            assert time.monotonic() < end, "UCX does not finish"
        return int(status)

    nothing = _Zeroed()
    source = ctypes.create_string_buffer(data, len(data))
    put = ucx.ucp_put_nbx(
        endpoint, source, ctypes.c_size_t(len(data)), ctypes.c_uint64(target), unpacked, ctypes.byref(nothing)
    )
    return finish(put) or finish(ucx.ucp_ep_flush_nbx(endpoint, ctypes.byref(nothing)))
