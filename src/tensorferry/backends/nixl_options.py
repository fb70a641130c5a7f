# SPDX-License-Identifier: Apache-2.0
"""What ``backend_options`` mean for NIXL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from tensorferry.errors import UsageError

UCX_DEFAULTS = {  # as for our own UCX, and for the same reasons (backends/ucx_native.py)
    "TCP_TX_SEG_SIZE": "512k",
    "TCP_RX_SEG_SIZE": "512k",
    "TCP_CONN_NB": "y",
    "TCP_KEEPIDLE": "3s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
}


class Options(NamedTuple):
    """What ``backend_options`` say.

    Attributes:
        plugin: Name of NIXL's plugin.
        progress_thread: Whether NIXL has a thread of its own, which takes a core.
        parameters: Of the plugin.
        settings: Of UCX, for the plugin ``UCX``.
    """

    plugin: str
    progress_thread: bool
    parameters: dict[str, str]
    settings: dict[str, str]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Options:
        """Sort options by whom they are for; names in capitals are UCX's.

        Raises:
            UsageError: One is not understood, or cannot be passed on.
        """
        rest = dict(options)
        plugin = rest.pop("plugin", "UCX")
        thread = rest.pop("progress_thread", "no")
        if thread not in ("yes", "no"):
            raise UsageError(f"the option progress_thread is 'yes' or 'no', not {thread!r}")
        settings = {name: rest.pop(name) for name in list(rest) if name.isupper()}
        if settings and plugin != "UCX":
            raise UsageError(f"{', '.join(settings)}: UCX's settings are for NIXL's plugin UCX, not {plugin}")
        for name, value in settings.items():
            if "," in value:
                raise UsageError(
                    f"NIXL cannot pass {name}={value} on because of the comma: set UCX_{name} "
                    "in the environment"
                )
        return cls(plugin, thread == "yes", rest, settings)

    def for_plugin(self) -> dict[str, str]:
        """Return the plugin's parameters, among them our settings of UCX, unless somebody else set them."""
        if self.plugin != "UCX":
            return self.parameters
        given = self.parameters.get("engine_config", "")
        named = {part.partition("=")[0] for part in given.split(",")} | set(self.settings)
        ours = {
            name: value
            for name, value in UCX_DEFAULTS.items()
            if name not in named and f"UCX_{name}" not in os.environ
        }
        settings = [f"{name}={value}" for name, value in {**ours, **self.settings}.items()]
        return {**self.parameters, "engine_config": ",".join(filter(None, [given, *settings]))}
