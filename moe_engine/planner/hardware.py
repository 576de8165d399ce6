"""Cards, links and networks: what a cluster could do at best. `Efficiency` is what programs reach of it.

Published peaks only (`conf/cluster/`, with the source of each figure there); nothing here is fitted. A rank's way to
another is its link (NVLink, Infinity Fabric) inside a node and its network card outside; a node is whatever the link
joins: 8 cards, or 72 in a rack of GB200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_engine.config.errors import ConfigError

TOPOLOGIES = ("fat_tree", "rail")


@dataclass
class ClusterConfig:
    """A cluster of equal cards. Rates per card and in one direction; GB is 1e9 bytes. fp4_tflops 0: cannot do it.

    memory_gb: what a program can allocate. link_gb_s, network_gb_s: NVLink, and the card's share of the node's network.
    topology: `fat_tree`, or `rail`: card i of every node on switch i, so that traffic between different i goes over the
    link first. oversubscription: of the network above the first switch, which joins `leaf_nodes` nodes.
    runtime_gb: taken by the driver, the communication library and the allocator's gaps.
    """

    card: str = "H100"
    gpus: int = 8
    gpus_per_node: int = 8
    bf16_tflops: float = 989.4
    fp8_tflops: float = 1978.9
    fp4_tflops: float = 0.0
    memory_gb: float = 80.0
    memory_tb_s: float = 3.35
    link_gb_s: float = 450.0
    link_latency_us: float = 3.3
    network_gb_s: float = 50.0
    network_latency_us: float = 3.7
    topology: str = "fat_tree"
    leaf_nodes: int = 32
    oversubscription: float = 1.0
    runtime_gb: float = 4.0

    def __post_init__(self) -> None:
        problems = []
        for name in ("gpus", "gpus_per_node", "leaf_nodes"):
            if getattr(self, name) < 1:
                problems.append(f"cluster.{name}={getattr(self, name)}: must be 1 or more; use cluster.{name}=8")
        for name in ("bf16_tflops", "fp8_tflops", "memory_gb", "memory_tb_s", "link_gb_s", "network_gb_s"):
            if getattr(self, name) <= 0:
                problems.append(f"cluster.{name}={getattr(self, name)}: must be positive; leave it out for the card's")
        for name in ("link_latency_us", "network_latency_us", "runtime_gb"):
            if getattr(self, name) < 0:
                problems.append(f"cluster.{name}={getattr(self, name)}: must be 0 or more; use cluster.{name}=0")
        if self.runtime_gb >= self.memory_gb > 0:
            problems.append(
                f"cluster.runtime_gb={self.runtime_gb}: leaves nothing of cluster.memory_gb={self.memory_gb}; "
                "use less, for example cluster.runtime_gb=0"
            )
        if self.oversubscription < 1:
            problems.append(f"cluster.oversubscription={self.oversubscription}: must be 1 or more; use 1 for none")
        if self.topology not in TOPOLOGIES:
            problems.append(f"cluster.topology={self.topology}: no such topology; use one of {', '.join(TOPOLOGIES)}")
        if problems:
            raise ConfigError("\n".join(problems))

    def peak(self, compute: str) -> float:
        """FLOP/s of one card in `bf16`, `fp8` or `fp4`; the next wider format where the card has no such units."""
        narrow = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops or self.fp8_tflops}
        return narrow.get(compute, self.bf16_tflops) * 1e12


@dataclass(frozen=True)
class Efficiency:
    """What programs reach of the peaks: the six numbers fitted for each card, precision and software.

    matmul, grouped, attention, memory, links: shares of the card's matrix rate (dense and experts' products, attention
    core), memory rate, and link and network rates. block_us: time that each pass through a block takes besides, in
    launches and small kernels.
    """

    matmul: float = 0.75
    grouped: float = 0.6
    attention: float = 0.65
    memory: float = 0.8
    links: float = 0.8
    block_us: float = 100.0


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: `size`, of which `local` share a node; `stride` ranks lie between neighbours."""

    size: int
    local: int
    nodes: int


def group(cluster: ClusterConfig, size: int, stride: int = 1) -> Group:
    """Where `size` ranks, `stride` apart, lie."""
    local = max(1, min(size, cluster.gpus_per_node // stride)) if stride < cluster.gpus_per_node else 1
    return Group(size, local, math.ceil(size / local))


def ring_seconds(cluster: ClusterConfig, ranks: Group, volume: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `volume` bytes (the whole, not a rank's part) at the peak rates.

    Every rank passes on volume·(n-1)/n. Over nodes, all local ranks' network cards carry a part each.
    """
    if ranks.size == 1:
        return 0.0
    share = volume * (ranks.size - 1) / ranks.size
    if ranks.nodes == 1:
        return share / (cluster.link_gb_s * 1e9) + latency(cluster, ranks)
    return max(share / (cluster.link_gb_s * 1e9), share / (ranks.local * network_rate(cluster, ranks.nodes))) + latency(
        cluster, ranks
    )


def all_to_all_seconds(cluster: ClusterConfig, ranks: Group, inside: float, outside: float) -> float:
    """Seconds to send `inside` bytes to ranks of the node and `outside` bytes to others, from each rank.

    The two go at the same time. On rails, what leaves the node goes over the link once more.
    """
    if ranks.size == 1:
        return 0.0
    link = inside + (outside if cluster.topology == "rail" else 0.0)
    wire = outside / network_rate(cluster, ranks.nodes) if outside else 0.0
    return max(link / (cluster.link_gb_s * 1e9), wire) + latency(cluster, ranks)


def message_seconds(cluster: ClusterConfig, volume: float, stride: int) -> float:
    """Seconds of one message of `volume` bytes between ranks that are `stride` apart."""
    if stride < cluster.gpus_per_node:
        return volume / (cluster.link_gb_s * 1e9) + cluster.link_latency_us * 1e-6
    return volume / (cluster.network_gb_s * 1e9) + cluster.network_latency_us * 1e-6


def network_rate(cluster: ClusterConfig, nodes: int) -> float:
    """Bytes per second of one card's network over so many nodes; oversubscribed above the first switch."""
    return cluster.network_gb_s * 1e9 / (cluster.oversubscription if nodes > cluster.leaf_nodes else 1.0)


def latency(cluster: ClusterConfig, ranks: Group) -> float:
    """Seconds before the first byte has gone round: a tree over nodes, a ring inside."""
    inside = (ranks.local - 1) * cluster.link_latency_us
    return (inside + math.ceil(math.log2(ranks.nodes)) * 2 * cluster.network_latency_us) * 1e-6
