"""The classifier on a ResNet. A file of its own, because timm takes seconds to import."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from timm.layers.norm_act import GroupNormAct
from timm.layers.std_conv import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from murmuration.model.classifier import Classifier
from murmuration.model.settings import SettingsError, Shape


class ResNetClassifier(Classifier):
    """timm's pre-activation ResNet as in BiT: weight-standardised convolutions and GroupNorm, no BatchNorm. For small
    images, a wide ResNet as De et al. train it: basic blocks at full resolution."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        net = shape.resnet
        if net is None:
            raise SettingsError("a ResNet classifier needs model.stages or a size such as r50x1.")
        self.shape, convolution = shape, partial(StdConv2d, eps=1e-8)
        self.body = ResNetV2(
            layers=list(net.stages),
            channels=net.channels,
            num_classes=0,
            stem_chs=net.width,
            stem_type="fixed",
            norm_layer=partial(GroupNormAct, num_groups=net.groups),
            conv_layer=convolution,
            basic=net.small_images,
            bottle_ratio=1.0 if net.small_images else 0.25,
        )
        if net.small_images:
            self.body.stem = nn.Sequential(OrderedDict(conv=convolution(3, net.width, 3)))
        self.add_head(shape)

    def features(self, images: Tensor) -> Tensor:
        return self.body.forward_features(images).mean((2, 3))
