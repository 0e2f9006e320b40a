"""The operations behind `dissensus.data.corruptions`: pure functions of images, random numbers and explicit constants.

Every operation takes images (B, C, H, W), floating, on the 8-bit grid k/255 in [0, 1] with C = 1 or 3, and returns the
same shape, not yet clipped or truncated to eight bits. Random operations take all random numbers from `draws`.
"""
