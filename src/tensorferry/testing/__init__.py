# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: what every backend must do, as pytest classes to derive from.

::

    from tensorferry.testing import BackendUnderTest, ReadContract

    class TestMine(ReadContract):
        backend = BackendUnderTest("mine", module="mine.backend", access="rdma")

:class:`ReadContract` is for ``rdma`` access, :class:`ServedContract` for ``served``, where there is
more to check, and :class:`ViewContract` for ``mapped``.  Each test has its pools in a process that was
spawned, and its reader in pytest's.  ``docs/backends.md`` says how to write a backend.  pytest must be
installed, which tensorferry itself does not need.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError("tensorferry.testing needs pytest: pip install pytest") from error

pytest.register_assert_rewrite(
    *(f"tensorferry.testing.{name}" for name in ("contract", "read_contract", "user_contract"))
)

from tensorferry.testing.contract import BackendContract, ViewContract  # noqa: E402
from tensorferry.testing.host import BackendUnderTest, Exported, Host  # noqa: E402
from tensorferry.testing.read_contract import ReadContract, ServedContract  # noqa: E402

__all__ = [
    "BackendContract",
    "BackendUnderTest",
    "Exported",
    "Host",
    "ReadContract",
    "ServedContract",
    "ViewContract",
]
