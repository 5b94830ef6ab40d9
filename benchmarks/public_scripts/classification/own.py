import operators  # noqa: F401
from torchvision.models import resnet18  # noqa: F401
