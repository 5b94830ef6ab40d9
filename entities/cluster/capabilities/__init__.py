"""What the slots of this node can do: measured by the standard stage, kept, labelled by the operator.

`measurement` has a device measured by an instance alone on the node, once per device and build of torch.
`peer_links` registers what jobs measure of the links to other nodes.
`slots` is pure: it divides devices into slots and says what each can do. `labels` reads what operators
write. The node agent calls them; nothing here decides where something runs.
"""
