"""Starting from what another run learnt: which tensors of its checkpoint go where, and the reading of them."""
