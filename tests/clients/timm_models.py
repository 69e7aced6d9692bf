"""timm: a vision transformer, a convolutional network, and one with batch normalization."""

import timm
from training import Outcome, case, train_on_images


@case
def vision_transformer() -> Outcome:
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3, drop_rate=0.1, drop_path_rate=0.1
    )
    return train_on_images(model, model.blocks, 16)


@case
def convnext() -> Outcome:
    model = timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 12, 16, 20), num_classes=3, drop_path_rate=0.1)
    return train_on_images(model, model.stages, 32)


@case
def resnet() -> Outcome:
    model = timm.create_model("resnet18", num_classes=3)
    return train_on_images(model, [model.layer1, model.layer2, model.layer3, model.layer4], 32)


@case
def swin() -> Outcome:
    model = timm.models.SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=3
    )
    return train_on_images(model, model.layers, 32)
