"""A real Kubernetes control plane on loopback, with a kubelet of the tests' own that runs pods as processes."""
