"""A stage's state in and out: checkpoints, weights, and the state that a newcomer gets.

It decides the layout of a checkpoint (torch.distributed.checkpoint) and of exported weights (safetensors
under full parameter names), and writes them beside the next step. The stage runtime calls it. It never
decides when a checkpoint is due: that is the orchestrator.
"""
