"""Lets torchvision's source be imported where its compiled part is missing: classification uses none of it.

torchvision describes its operators to torch as it is imported, which fails if they do not exist. Here they
are declared, without code.
"""

import torch

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

try:
    import torchvision
except RuntimeError:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in DECLARED:
        LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    import torchvision  # noqa: F401
