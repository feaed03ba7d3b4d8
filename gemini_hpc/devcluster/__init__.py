"""A real multi-node Slurm cluster on one machine, each node in its own namespaces."""

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.errors import DevclusterError
from gemini_hpc.devcluster.status import ClusterStatus, NodeStatus

__all__ = ["Cluster", "ClusterStatus", "DevclusterError", "NodeStatus"]
