"""What a server allows, and to whom."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits, keys and names of a server.

    Attributes:
        model_name: what clients call the model; None for the target's name.
        api_keys: any of them opens everything; none opens it to all who can connect.
        max_queue: choices that may wait beyond the engine's slots; more are refused with 429 and Retry-After.
        queue_timeout: seconds until a request that got no token is given up, with 503.
        request_timeout: seconds until a request is ended, with 504 or an error event.
        drain_timeout: seconds that running requests have to finish once the server was told to stop.
        body_timeout: seconds that a client has for the next part of a request's body.
        write_timeout: seconds that a client may leave unread what it was sent; its connection is closed then.
        max_body_bytes: largest request body.
        max_prompt_tokens: longest prompt; None for what a slot holds.
        max_output_tokens: most tokens of one choice; None for what a slot holds.
        max_choices: most choices of a request (``n`` times prompts); None for what slots and queue hold.
        max_stops: most stop strings.
        max_logprobs: most alternatives a token.
        max_schema_bytes: largest JSON schema.
        template_args: variables of the chat template, for requests that don't set them.
        max_watchers: most live pages at once.
    """

    model_name: str | None = None
    api_keys: Sequence[str] = field(default=(), repr=False)
    max_queue: int = 256
    queue_timeout: float = 120.0
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_choices: int | None = None
    max_stops: int = 16
    max_logprobs: int = 20
    max_schema_bytes: int = 1 << 16
    template_args: Mapping[str, Any] = field(default_factory=dict)
    max_watchers: int = 16

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_stops", "max_logprobs", "max_watchers"):
            self._check(name, 0, whole=True)
        for name in ("max_body_bytes", "max_schema_bytes"):
            self._check(name, 1, whole=True)
        for name in ("max_prompt_tokens", "max_output_tokens", "max_choices"):
            if getattr(self, name) is not None:
                self._check(name, 1, whole=True)
        for name in ("queue_timeout", "request_timeout", "body_timeout", "write_timeout"):
            self._check(name, 0.001)
        self._check("drain_timeout", 0)
        if isinstance(self.api_keys, str) or not all(isinstance(k, str) and k.strip() for k in self.api_keys):
            raise ConfigError("ServerConfig.api_keys: expected a list of non-empty strings")
        object.__setattr__(self, "api_keys", tuple(self.api_keys))

    def _check(self, name: str, low: float, *, whole: bool = False) -> None:
        value = getattr(self, name)
        wanted = isinstance(value, int) if whole else isinstance(value, (int, float))
        if isinstance(value, bool) or not wanted or not math.isfinite(value) or value < low:
            kind = "an integer" if whole else "a number"
            raise ConfigError(f"ServerConfig.{name}: expected {kind} of at least {low}, got {value!r}")


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
