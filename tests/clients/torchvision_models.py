"""torchvision: networks with batch normalization, a vision transformer, and Swin."""

import torchvision
from training import Outcome, case, train_on_images


@case
def resnet() -> Outcome:
    model = torchvision.models.resnet18(num_classes=3)
    return train_on_images(model, [model.layer1, model.layer2, model.layer3, model.layer4], 32)


@case
def mobilenet() -> Outcome:
    model = torchvision.models.mobilenet_v3_small(num_classes=3)
    return train_on_images(model, model.features, 32)


@case
def vision_transformer() -> Outcome:
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=3
    )
    return train_on_images(model, model.encoder.layers, 16)


@case
def swin() -> Outcome:
    model = torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=3
    )
    return train_on_images(model, model.features, 32)
