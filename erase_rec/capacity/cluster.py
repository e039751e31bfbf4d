"""The machines that a plan is for, and how long collectives take on them.

Bytes that a rank passes on, of S bytes that it gives, W ranks (ring algorithms, as NCCL counts bus bandwidth):

==================  ==============================================================================================
``all_to_all``      S (W - 1) / W: what is for the rank itself stays
``reduce_scatter``  S (W - 1) / W, S being the whole of which a W-th comes back
``all_gather``      S (W - 1)
``all_reduce``      2 S (W - 1) / W
==================  ==============================================================================================

On one node they go over the links between its GPUs. Over nodes of L ranks an ``all_to_all`` sends (W - L) / W of S over
the rank's own network adapter; the others run L rings, one through each adapter, so that a node has the bandwidth of
all its adapters, but never more than a rank's links. A collective has a latency beside, which grows with the logarithm
of the nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

GPUS_OF_A_NODE = 8
"""Where nothing else is said."""
MOST_RANKS = 4096
"""For which a plan is made: it lists every table's places and every rank's memory."""
Kind = Literal["all_to_all", "reduce_scatter", "all_gather", "all_reduce"]


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, all alike. Bandwidths are of one GPU in one direction, in bytes a second.

    The defaults are those of an NVIDIA H200 in a DGX H200. Memory bandwidth and arithmetic are what a large copy and a
    large bf16 matrix product reached on one (docs/results/table1-h200-x2/speed.json, ``ceilings``); links (900 GB/s,
    both directions together), network (eight adapters of 400 Gb/s) and host memory (2 TB a node) stand in NVIDIA's data
    sheet; of its 141 GB of memory programs see 139 GiB. The latency is an assumption near what
    small collectives took between two H200s.

    Attributes:
        ranks: GPUs in all.
        nodes: machines, each with as many GPUs.
        hbm_gib: memory of a GPU.
        host_gib: memory of a node for tables.
        memory_bytes_per_s: of a GPU's memory.
        flops_per_s: of matrix products.
        link_bytes_per_s: to the other GPUs of the node.
        network_bytes_per_s: to other nodes.
        latency_us: of a collective on one node.
    """

    ranks: int
    nodes: int = 1
    hbm_gib: float = 139.0
    host_gib: float = 1862.0
    memory_bytes_per_s: float = 4.19e12
    flops_per_s: float = 788e12
    link_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9
    latency_us: float = 20.0

    @property
    def local_ranks(self) -> int:
        """GPUs of a node."""
        return self.ranks // self.nodes

    def grown_to(self, ranks: int) -> Cluster:
        """One of at least so many ranks: more GPUs on one node while it has room, or whole nodes."""
        size = max(self.local_ranks, GPUS_OF_A_NODE)
        nodes = math.ceil(ranks / size)
        return replace(self, ranks=ranks if nodes == 1 else nodes * size, nodes=nodes)

    def passed_on(self, kind: Kind, given_bytes: float) -> float:
        """Bytes that a rank which gives ``given_bytes`` sends to others."""
        others = self.ranks - 1
        share = {"all_gather": others, "all_reduce": 2 * others / self.ranks}.get(kind, others / self.ranks)
        return given_bytes * share

    def over_network(self, kind: Kind, given_bytes: float) -> float:
        """Those of them that leave the node through the rank's adapter."""
        if self.nodes == 1:
            return 0.0
        if kind == "all_to_all":
            return given_bytes * (self.ranks - self.local_ranks) / self.ranks
        return self.passed_on(kind, given_bytes) / self.local_ranks

    def collective_ms(self, kind: Kind, given_bytes: float) -> float:
        """Time of one collective; 0 on a single rank."""
        if self.ranks == 1:
            return 0.0
        passed, outside = self.passed_on(kind, given_bytes), self.over_network(kind, given_bytes)
        inside = passed - outside if kind == "all_to_all" else passed
        seconds = max(inside / self.link_bytes_per_s, outside / self.network_bytes_per_s)
        return 1e3 * seconds + 1e-3 * self.latency_us * (1 + math.log2(self.nodes))
