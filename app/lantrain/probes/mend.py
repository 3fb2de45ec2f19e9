"""The commands that open a firewall to the LAN, and to nobody else.

From inside a container the machine's firewall cannot be seen, so the forms for ufw, firewalld and iptables are all
printed; what is seen on this machine comes first.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from pathlib import Path

import psutil

from lantrain.cluster.addresses import Interface

HIGHEST_PORT = 65535
FIRST_EPHEMERAL = 32768
"""Where Linux starts to hand out ports to whoever does not ask for one, as Gloo does."""


def in_container(root: Path = Path("/")) -> bool:
    """Whether this process is in a Docker or Podman container."""
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def first_ephemeral_port(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """The lowest port that this machine's kernel hands out by itself."""
    try:
        return int(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return FIRST_EPHEMERAL


def port_range(fixed: list[int], first_ephemeral: int | None = None) -> tuple[int, int]:
    """One range with the fixed ports and every port that Gloo may be given."""
    return min([*fixed, first_ephemeral or first_ephemeral_port()]), HIGHEST_PORT


def lan_of(peer: str, interface: Interface | None) -> str:
    """The network to open to: the interface's own when `peer` is on it, else `peer` alone."""
    address = ipaddress.ip_address(peer.split("%")[0])
    if interface is not None and not interface.network.is_loopback and address in interface.network:
        return str(interface.network)
    return str(ipaddress.ip_network(address))


def lan_towards(peer: str, used: Interface | None) -> str:
    """The network that `peer` has to let in for this machine: the LAN of both, else this machine alone."""
    if used is None:
        return str(ipaddress.ip_network(ipaddress.ip_address(peer.split("%")[0])))
    on_lan = ipaddress.ip_address(peer.split("%")[0]) in used.network
    return lan_of(used.address, used if on_lan else None)


def firewall_seen(root: Path = Path("/")) -> str:
    """ufw, firewalld, nftables, iptables, or "" where none can be seen (in a container, without rights)."""
    if in_container(root):
        return ""
    try:
        if "ENABLED=yes" in (root / "etc/ufw/ufw.conf").read_text().split():
            return "ufw"
    except OSError:
        pass
    if any(process.info["name"] == "firewalld" for process in psutil.process_iter(["name"])):
        return "firewalld"
    if shutil.which("nft") and _succeeds(["nft", "list", "chain", "inet", "filter", "input"]):
        return "nftables"
    return "iptables" if shutil.which("iptables") else ""


def _succeeds(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def open_firewall(network: str, ports: tuple[int, int], seen: str = "") -> dict[str, str]:
    """Commands that let `network` in on the TCP ports from ports[0] to ports[1], by firewall, `seen` first."""
    low, high = ports
    six = ":" in network
    family = "ipv6" if six else "ipv4"
    rule = f'rule family="{family}" source address="{network}" port port="{low}-{high}" protocol="tcp" accept'
    commands = {
        "ufw": f"sudo ufw allow proto tcp from {network} to any port {low}:{high}",
        "firewalld": f"sudo firewall-cmd --permanent --add-rich-rule='{rule}' && sudo firewall-cmd --reload",
        "iptables": f"sudo {'ip6tables' if six else 'iptables'} -I INPUT -s {network} -p tcp --dport {low}:{high} "
        "-j ACCEPT",
    }
    if seen == "nftables":
        saddr = "ip6 saddr" if six else "ip saddr"
        commands["nftables"] = f"sudo nft insert rule inet filter input {saddr} {network} tcp dport {low}-{high} accept"
    first = [tool for tool in (seen,) if tool in commands]
    return {tool: commands[tool] for tool in [*first, *(tool for tool in commands if tool not in first)]}
