"""The memory and the disks of a node, and the ranks and processes that share them."""
