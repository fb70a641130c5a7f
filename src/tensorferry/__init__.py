# SPDX-License-Identifier: Apache-2.0
"""Tensors from one process to another by one-sided reads, with nothing lost."""

from importlib.metadata import PackageNotFoundError, version

from tensorferry.allocator import BuddyAllocator
from tensorferry.buffer import SlotHandle, TransferTensorBuffer
from tensorferry.consumer import Consumer
from tensorferry.dtypes import dtype_to_str, str_to_dtype
from tensorferry.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConnectError,
    ForkedProcessError,
    IntegrityError,
    LeaseError,
    LeaseExpiredError,
    LeaseRevokedError,
    ManifestError,
    PayloadTooLargeError,
    PeerLostError,
    PoolExhaustedError,
    PoolTimeoutError,
    ProtocolError,
    RegistrationError,
    RemoteAccessError,
    StaleHandleError,
    TensorferryError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UsageError,
    VersionError,
)
from tensorferry.manifest import Manifest, read_manifest
from tensorferry.metrics import ConsumerStatistics, PeerStatistics, ProducerStatistics
from tensorferry.producer import Producer
from tensorferry.request import Request
from tensorferry.reservation import Reservation

try:
    __version__ = version("tensorferry")
except PackageNotFoundError:  # used from a checkout that is not installed
    __version__ = "0.0.0"

__all__ = [
    "AuthenticationError",
    "BackendUnavailableError",
    "BuddyAllocator",
    "CapacityError",
    "ClosedError",
    "ConnectError",
    "Consumer",
    "ConsumerStatistics",
    "ForkedProcessError",
    "IntegrityError",
    "LeaseError",
    "LeaseExpiredError",
    "LeaseRevokedError",
    "Manifest",
    "ManifestError",
    "PayloadTooLargeError",
    "PeerLostError",
    "PeerStatistics",
    "PoolExhaustedError",
    "PoolTimeoutError",
    "Producer",
    "ProducerStatistics",
    "ProtocolError",
    "RegistrationError",
    "RemoteAccessError",
    "Request",
    "Reservation",
    "SlotHandle",
    "StaleHandleError",
    "TensorferryError",
    "TransferCancelledError",
    "TransferError",
    "TransferTensorBuffer",
    "TransferTimeoutError",
    "UsageError",
    "VersionError",
    "__version__",
    "dtype_to_str",
    "read_manifest",
    "str_to_dtype",
]
