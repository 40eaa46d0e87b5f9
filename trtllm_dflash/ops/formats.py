"""Formats of few bits: how many numbers share a scale, and the scale bytes that mean something by themselves."""

#: FP8: what the sides of a matrix must be multiples of, or the hardware's products cannot take it.
FP8_MULTIPLE = 16
#: FP8: sides of the blocks that share a scale, where it is not a row that does.
FP8_BLOCK = 128

#: INT4: numbers of a row that share a scale, and that an int32 holds.
INT4_BLOCK, INT4_PACKED = 32, 8

#: NVFP4: numbers of a row that share a scale.
NVFP4_BLOCK = 16

#: MXFP4: numbers that share a scale, and the bytes that hold them.
MXFP4_BLOCK = 32
MXFP4_BLOCK_BYTES = MXFP4_BLOCK // 2
#: MXFP4: the scale bytes that stand for 1, and for not a number.
E8M0_ONE, E8M0_NAN = 127, 255
