"""The tensor lists pushed by the benchmarks: sizes in fp32 elements, front layer first."""

__all__ = ["LISTS"]


def _resnet18() -> list[int]:
    """The 62 trainable tensors of ResNet-18 for 1000 classes: 11 689 512 elements."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    before = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            sizes += [channels * before * 9, channels, channels, channels * channels * 9, channels, channels]
            if block == 0 and stage > 0:
                sizes += [channels * before, channels, channels]
            before = channels
    return [*sizes, 1000 * 512, 1000]


def _cnn() -> list[int]:
    """The 10 tensors of the bundled small CNN."""
    shapes = [(16, 25), (32, 16 * 25), (256, 512), (128, 256), (10, 128)]
    return [size for rows, columns in shapes for size in (rows * columns, rows)]


LISTS = {"resnet18": _resnet18(), "cnn": _cnn(), "small-resnet18": [-(-size // 10) for size in _resnet18()]}
