"""Who may talk to the hub: addresses, an optional token, and how often.

Gloo and the TCPStore have no authentication, so this keeps strangers from joining by the front door and reading the
run's settings; it does not make an open network safe (README, Security).
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import defaultdict, deque
from collections.abc import Callable

from lantrain.errors import UserError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

REQUESTS_PER_SECOND = 40
"""From one address; a node beats twice a second, and probing needs a few dozen requests at once."""
BURST_SECONDS = 5


def parse_networks(text: str) -> list[Network]:
    """Networks from ALLOW, addresses or CIDR blocks separated by commas or spaces. Raises UserError."""
    networks = []
    for word in text.replace(",", " ").split():
        try:
            networks.append(ipaddress.ip_network(word, strict=False))
        except ValueError:
            raise UserError(f"ALLOW: {word!r} is not a network", "for example ALLOW=192.168.1.0/24") from None
    return networks


class Admission:
    """Decides about each request by address, token and rate."""

    def __init__(self, networks: list[Network], token: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.networks, self._token, self._clock = networks, token, clock
        self._requests: dict[str, deque[float]] = defaultdict(deque)

    def address_allowed(self, address: str) -> bool:
        """Whether `address` is this machine or in one of the networks."""
        try:
            ip = ipaddress.ip_address(address.split("%")[0])
        except ValueError:
            return False
        mapped = getattr(ip, "ipv4_mapped", None)
        ip = mapped or ip
        return ip.is_loopback or any(ip in network for network in self.networks if network.version == ip.version)

    def token_matches(self, given: str) -> bool:
        """Compare in constant time; without a token of ours every caller matches."""
        return not self._token or hmac.compare_digest(given.encode(), self._token.encode())

    def within_rate(self, address: str) -> bool:
        """Whether `address` has asked less than it may; counts this request."""
        now, seen = self._clock(), self._requests[address]
        while seen and now - seen[0] > BURST_SECONDS:
            seen.popleft()
        if len(seen) >= REQUESTS_PER_SECOND * BURST_SECONDS:
            return False
        seen.append(now)
        if len(self._requests) > 4096:  # addresses that went away
            recent = {a: q for a, q in self._requests.items() if q and now - q[-1] <= BURST_SECONDS}
            self._requests = defaultdict(deque, recent)
        return True
