# SPDX-License-Identifier: Apache-2.0
"""The exceptions of tensorferry.

::

    TensorferryError
    ├── UsageError
    │   ├── ClosedError
    │   ├── StaleHandleError
    │   ├── PayloadTooLargeError
    │   └── ForkedProcessError
    ├── CapacityError
    │   ├── PoolExhaustedError
    │   └── PoolTimeoutError           (also TimeoutError)
    ├── ProtocolError
    │   ├── ManifestError              (also ValueError)
    │   ├── VersionError
    │   ├── AuthenticationError
    │   └── IntegrityError
    ├── LeaseError
    │   ├── LeaseExpiredError
    │   └── LeaseRevokedError
    ├── TransferError
    │   ├── ConnectError
    │   ├── PeerLostError
    │   ├── RemoteAccessError
    │   ├── TransferTimeoutError       (also TimeoutError)
    │   └── TransferCancelledError
    ├── RegistrationError
    └── BackendUnavailableError

``CapacityError`` is the one branch that a retry loop may catch: nothing was done, and
trying again later may succeed.  ``UsageError`` is a mistake in the calling program.
``docs/errors.md`` says for each class what happened, what is still true and what to do.
"""

from __future__ import annotations

from typing import Literal

Scope = Literal["operation", "peer", "backend"]


class TensorferryError(Exception):
    """Base of every error that tensorferry raises on its own account."""


class UsageError(TensorferryError):
    """The call was wrong; nothing was changed."""


class ClosedError(UsageError):
    """The object was closed by its owner before or during the call."""


class StaleHandleError(UsageError):
    """A lent handle was used after it had been given back."""


class PayloadTooLargeError(UsageError):
    """The payload can never fit into the pool, however empty it is."""


class ForkedProcessError(UsageError):
    """An object made before ``fork()`` was used in the child; make a new one there."""


class CapacityError(TensorferryError):
    """There is no room right now; nothing was changed, and a retry may succeed.

    Attributes:
        requested_nbytes: Bytes that were asked for.
        free_nbytes: Bytes of the pool that were free, in however many pieces.
        pool_nbytes: Bytes of the pool; 0 where it was not memory that ran out.
    """

    def __init__(
        self, message: str, *, requested_nbytes: int = 0, free_nbytes: int = 0, pool_nbytes: int = 0
    ) -> None:
        """Keep the message and the figures."""
        super().__init__(message)
        self.requested_nbytes = requested_nbytes
        self.free_nbytes = free_nbytes
        self.pool_nbytes = pool_nbytes


class PoolExhaustedError(CapacityError):
    """The pool has no free block that is large enough at this moment."""


class PoolTimeoutError(CapacityError, TimeoutError):
    """No room became free within the time that the caller was willing to wait."""


class ProtocolError(TensorferryError):
    """A peer sent something that is not allowed; nothing of it was acted upon."""


class ManifestError(ProtocolError, ValueError):
    """The manifest is malformed, out of bounds, or not meant for this backend."""


class VersionError(ProtocolError):
    """The manifest was written for another major version of the wire format."""


class AuthenticationError(ProtocolError):
    """The message carries no valid MAC although a key is set, or the other way round."""


class IntegrityError(ProtocolError):
    """A tensor's checksum does not match the bytes that arrived; they were discarded."""


class LeaseError(TensorferryError):
    """The slot is no longer the consumer's to read; any data that came was discarded."""


class LeaseExpiredError(LeaseError):
    """The slot was given back, or may have been reused, before the data was safe."""


class LeaseRevokedError(LeaseError):
    """The producer took the publication back."""


class TransferError(TensorferryError):
    """Bytes did not arrive.

    Attributes:
        scope: The largest thing that is lost: this ``"operation"``, the connection to this
            ``"peer"``, or the whole ``"backend"``.
        status: The native status code, 0 where the failure has none.
    """

    def __init__(self, message: str, *, scope: Scope = "operation", status: int = 0) -> None:
        """Keep the message, its scope and the native status."""
        super().__init__(message)
        self.scope: Scope = scope
        self.status = status


class ConnectError(TransferError):
    """No connection to the peer could be made."""


class PeerLostError(TransferError):
    """The peer closed, died or became unreachable; a later pull connects anew."""


class RemoteAccessError(TransferError):
    """The peer or its network card refused to let this memory be read."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The transfer did not end within the caller's time."""


class TransferCancelledError(TransferError):
    """The transfer was cancelled from this side."""


class RegistrationError(TensorferryError):
    """Memory could not be allocated for, or registered with, the backend."""


class BackendUnavailableError(TensorferryError):
    """The backend or its library cannot be used on this machine; the message says why."""
