"""Who may do what: policies of the operator and of nodes, and whether they are granted."""
