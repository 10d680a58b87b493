"""ResNet-50 and VGG-19 for images of 224 x 224: the tensors of each layer, and its part of the computing."""

from dataclasses import dataclass

__all__ = ["MODELS", "Layer", "Model"]


@dataclass(frozen=True)
class Layer:
    """sizes: elements of its tensors. work: multiplications in the forward pass, for one image."""

    sizes: tuple[int, ...]
    work: int


@dataclass(frozen=True)
class Model:
    """forward, backward: milliseconds for a batch of 16 on a Pascal Titan X with cuDNN 5.1, as published on
    https://github.com/jcjohnson/cnn-benchmarks; a layer's part of them follows from its work.
    """

    layers: tuple[Layer, ...]
    forward: float
    backward: float

    def scaled(self, megabytes: float) -> "Model":
        """The same, with all tensors made smaller so that they have so many megabytes; 0 leaves them."""
        sizes = [size for layer in self.layers for size in layer.sizes]
        factor = min(1.0, megabytes * 1e6 / 4 / sum(sizes)) if megabytes else 1.0
        layers = [Layer(tuple(max(1, round(size * factor)) for size in each.sizes), each.work) for each in self.layers]
        return Model(tuple(layers), self.forward, self.backward)


def _vgg19() -> tuple[Layer, ...]:
    layers, before, width = [], 3, 224
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            kernel = channels * before * 9
            layers.append(Layer((kernel, channels), kernel * width * width))
            before = channels
        width //= 2
    dense = ((4096, 25088), (4096, 4096), (1000, 4096))
    return (*layers, *(Layer((rows * columns, rows), rows * columns) for rows, columns in dense))


def _resnet50() -> tuple[Layer, ...]:
    def convolution(before: int, channels: int, kernel: int, width: int) -> Layer:
        """With its normalisation."""
        size = channels * before * kernel * kernel
        return Layer((size, channels, channels), size * width * width)

    layers, before, width = [convolution(3, 64, 7, 112)], 64, 56
    for stage, (channels, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(count):
            first = width * 2 if block == 0 and stage else width
            layers += [convolution(before, channels, 1, first), convolution(channels, channels, 3, width)]
            layers.append(convolution(channels, channels * 4, 1, width))
            if block == 0:
                layers.append(convolution(before, channels * 4, 1, width))
            before = channels * 4
        width //= 2
    return (*layers, Layer((1000 * 2048, 1000), 1000 * 2048))


MODELS = {"resnet50": Model(_resnet50(), 35.03, 68.54), "vgg19": Model(_vgg19(), 48.09, 99.23)}
