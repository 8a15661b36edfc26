"""The recall of guessing."""

import math


def chance_of_recall(direction: str, rank: int, *, images: float, captions: float) -> float:
    """For a caption one of all images is right, for an image its captions among all of them: their mean number is
    taken for every image.
    """
    if not images >= 1:
        return math.nan
    if direction == "text_to_image":
        return min(1.0, rank / images)
    if not captions > rank:
        return math.nan
    return 1 - math.prod(max(0.0, 1 - captions / images / (captions - n)) for n in range(rank))
