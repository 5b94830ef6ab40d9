"""A real control plane of Kubernetes as local processes, and nodes whose pods are processes here.

For benchmarks and tests alone: the product never needs it. It decides nothing; the binaries are those of the
folder that `KUBEBUILDER_ASSETS` names (ADR-0184).

- `control_plane`: etcd, API server, controllers and scheduler, started, killed and started again
- `fake_kubelet`: nodes, which run pods as processes
"""
