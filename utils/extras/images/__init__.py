"""Image files for the example: folders and CSV lists, their augmentation, torchvision's models and published weights.

It costs no time in other runs. Who trains a classifier of images needs it; without it the example is MiniResNet on
synthetic images or CIFAR-10, with crops and flips.
"""
