"""Limits of a server: how often and how many at a time one caller may call, and how often an address may try tokens.

A caller is a token, a uid, or whoever uses the ports of one sandbox. Each has a bucket that fills at `server.rate` a
second and holds twice as many calls, and a count of those that are served. A body that is kept as a whole takes more of
the bucket, and all of a caller's together have a bound: read, such a body is many times as large. Tokens that are
refused empty a bucket of their address. When that is empty, only tokens are looked at that were good here before, so
that nobody can be shut out by somebody behind the same address.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

from skerry.config import ServerSettings
from skerry.surfaces.rest.problems import Refused

_BYTES_OF_A_CALL = 32 << 10
"""Bytes of a body that count as one call more."""
_HELD = 4
"""The most that bodies of one caller may hold together, as times `server.max_body`."""
_REFUSED_RATE = 5.0
"""Refused tokens a second of one address, over a while; some more at once."""
_REFUSED_BURST = 20.0
_TOLD_RATE = 50.0
"""Refused tokens a second that the ledger is told of, whatever their addresses."""
_GOOD_S = 3600.0
"""How long a token that was good is looked at again, whatever its address has done since."""
_MOST_KNOWN = 10_000
"""The most callers, addresses or tokens that are remembered; the longest unseen is forgotten."""


class TooMany(Refused):
    """A call that is refused for now."""

    def __init__(self, why: str, detail: str, retry_after_s: float) -> None:
        """`why` is a word for it: `calls`, `rate`, `bodies` or `tokens`."""
        self.why = why
        wait_s = max(1, math.ceil(retry_after_s))
        super().__init__(429, detail, "too_many_calls", {"retry-after": str(wait_s)})


class Bucket:
    """Tokens that come at a rate, up to a bound."""

    __slots__ = ("_at", "left")

    def __init__(self, burst: float, now: float) -> None:
        self.left = burst
        self._at = now

    def take(self, rate: float, burst: float, now: float) -> float:
        """Take one; 0, or the seconds until there is one."""
        self.fill(rate, burst, now)
        if self.left >= 1:
            self.left -= 1
            return 0.0
        return (1 - self.left) / rate

    def fill(self, rate: float, burst: float, now: float) -> None:
        self.left = min(burst, self.left + (now - self._at) * rate)
        self._at = now


class _Caller:
    __slots__ = ("bucket", "calls", "held")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.calls = 0
        self.held = 0


class Counted:
    """A call that is counted in, until `end`."""

    __slots__ = ("_caller", "_held", "_most")

    def __init__(self, caller: _Caller, most: int) -> None:
        """`most` bytes may be held by all calls of its caller."""
        self._caller, self._most, self._held = caller, most, 0
        caller.calls += 1

    def hold(self, count: int) -> None:
        """Count bytes of its body in, which are kept until its end. Raises TooMany."""
        if self._caller.held + count > self._most:
            raise TooMany("bodies", f"bodies of your calls hold {self._most} bytes already; see server.max_body", 1)
        self._held += count
        self._caller.held += count
        self._caller.bucket.left -= count / _BYTES_OF_A_CALL

    def end(self) -> None:
        self._caller.calls -= 1
        self._caller.held -= self._held


class Limits:
    """What callers have used of what they may."""

    def __init__(self, settings: Callable[[], ServerSettings], now: Callable[[], float] = time.monotonic) -> None:
        """`settings` are those of the moment."""
        self._settings = settings
        self._now = now
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self._refused: OrderedDict[str, Bucket] = OrderedDict()
        self._good: OrderedDict[bytes, float] = OrderedDict()
        self._told = Bucket(_TOLD_RATE, now())

    def begin(self, name: str) -> Counted:
        """Count a call of a caller in. Raises TooMany."""
        settings, now = self._settings(), self._now()
        caller = self._callers.get(name)
        if caller is None:
            caller = self._callers[name] = _Caller(Bucket(2.0 * settings.rate, now))
            self._forget_callers()
        else:
            self._callers.move_to_end(name)
        if caller.calls >= settings.max_calls:
            raise TooMany("calls", f"{settings.max_calls} calls are served already; see server.max_calls", 1)
        if wait_s := caller.bucket.take(settings.rate, 2.0 * settings.rate, now):
            raise TooMany("rate", f"more than {settings.rate} calls a second; see server.rate", wait_s)
        return Counted(caller, _HELD * settings.max_body)

    def held(self, name: str) -> int:
        """Bytes that bodies of a caller hold."""
        caller = self._callers.get(name)
        return 0 if caller is None else caller.held

    def _forget_callers(self) -> None:
        """Forget who has not called for longest, but for those whose calls are served."""
        while len(self._callers) > _MOST_KNOWN:
            name, caller = self._callers.popitem(last=False)
            if caller.calls:
                self._callers[name] = caller
                return

    def check(self, address: str, token: str) -> None:
        """Raise TooMany for a token that is not to be looked at: too many from its address were refused."""
        bucket = self._refused.get(_network(address))
        if bucket is None:
            return
        bucket.fill(_REFUSED_RATE, _REFUSED_BURST, self._now())
        if bucket.left < 1 and self._good.get(_key(token), -math.inf) < self._now():
            raise TooMany("tokens", "too many tokens from this address were refused", (1 - bucket.left) / _REFUSED_RATE)

    def accepted(self, token: str) -> None:
        """Remember that a token was good."""
        key = _key(token)
        self._good[key] = self._now() + _GOOD_S
        self._good.move_to_end(key)
        if len(self._good) > _MOST_KNOWN:
            self._good.popitem(last=False)

    def refused(self, address: str) -> bool:
        """Remember that a token was refused; whether the ledger is to be told of it."""
        network, now = _network(address), self._now()
        bucket = self._refused.setdefault(network, Bucket(_REFUSED_BURST, now))
        self._refused.move_to_end(network)
        bucket.take(_REFUSED_RATE, _REFUSED_BURST, now)
        if len(self._refused) > _MOST_KNOWN:
            self._refused.popitem(last=False)
        return not self._told.take(_TOLD_RATE, _TOLD_RATE, now)


def _key(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()


def _network(address: str) -> str:
    """What one client has of addresses: of IPv6 all of a network."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped) if ip.ipv4_mapped else str(ipaddress.ip_network((ip, 64), strict=False))
